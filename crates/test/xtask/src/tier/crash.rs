//! `kill -9` of the node during a verified write load: after the restart, every write that was
//! acknowledged and flushed (or sent with FUA) must be there, and nothing that was not sent.
//!
//! Several sessions of both protocols each own a range and record its state (`probe::registers`).
//! After every restart, each range is read back through the protocol that did not write it.

use crate::{
    node::{ExportedVolume, Node, NodeOptions},
    run_context::RunContext,
};
use anyhow::{Context, Result, anyhow, ensure};
use probe::{
    BlockClient,
    iscsi::Session,
    nvme::Controller,
    registers::{RegisterModel, SeededRng},
};
use std::{io, net::SocketAddr, time::Duration};

const ROUNDS: u64 = 6;
const SESSIONS: u64 = 4;
/// 512-byte blocks in the range of one session.
const RANGE: u64 = 8192;
/// The least time until the kill; a random time is added.
const LOAD: Duration = Duration::from_millis(600);

/// A session's range and its recorded state.
struct Writer {
    number: u64,
    volume: ExportedVolume,
    model: RegisterModel,
    dice: SeededRng,
}

pub(super) fn run(context: &RunContext) -> Result<()> {
    let mut node = Node::new(context, context.scratch(), "crash", &NodeOptions::default())?;
    node.start()?;
    let volumes = [node.create("first", "64MiB")?, node.create("second", "64MiB")?];
    let mut writers: Vec<Writer> =
        (0..SESSIONS).map(|number| Writer::new(number, &volumes)).collect();
    for round in 0..ROUNDS {
        let name = format!("kill -9 under load, round {}", round + 1);
        let passed = context.check(&name, || one_round(&mut node, &mut writers, round));
        if !passed {
            context.display.line(&crate::process::tail(&node.log().unwrap_or_default()));
            return Ok(());
        }
    }
    context.check("after the last crash everything is there, through both protocols", || {
        for protocol in 0..2 {
            for writer in &mut writers {
                writer.verify(&node, protocol)?;
            }
        }
        Ok(())
    });
    context.check("an orderly end after the crashes", || {
        let status = node.stop()?;
        ensure!(status.success(), "the node ended with {status}");
        Ok(())
    });
    let written: u64 = writers.iter().map(|writer| writer.model.acknowledged).sum();
    context.display.line(&format!("  {written} blocks acknowledged under {ROUNDS} crashes"));
    Ok(())
}

/// Load, kill, restart, verification.
fn one_round(node: &mut Node, writers: &mut [Writer], round: u64) -> Result<()> {
    let before: u64 = writers.iter().map(|writer| writer.model.acknowledged).sum();
    let moment = LOAD + Duration::from_millis(SeededRng::new(round).next_below(600));
    let nvme = node.nvme;
    std::thread::scope(|scope| -> Result<()> {
        let running: Vec<_> = writers
            .iter_mut()
            .map(|writer| scope.spawn(move || writer.load(nvme, round)))
            .collect();
        std::thread::sleep(moment);
        let killed = node.alive().and_then(|()| node.kill());
        for writer in running {
            writer.join().map_err(|_| anyhow!("a writer panicked"))??;
        }
        killed
    })?;
    let after: u64 = writers.iter().map(|writer| writer.model.acknowledged).sum();
    ensure!(after > before + 100, "hardly any load before the kill: {} blocks", after - before);
    node.start().context("restart after kill -9")?;
    for writer in writers.iter_mut() {
        writer.verify(node, round + 1)?;
    }
    Ok(())
}

impl Writer {
    fn new(number: u64, volumes: &[ExportedVolume; 2]) -> Self {
        let volume = volumes[usize::from(number % 2 == 1)].clone();
        let first = number / 2 * RANGE;
        let model = RegisterModel::new(number, first, usize::try_from(RANGE).unwrap_or(0));
        Self { number, volume, model, dice: SeededRng::new(number) }
    }

    /// Writes until the connection breaks. A wrong answer or a hang is an error.
    fn load(&mut self, nvme: SocketAddr, round: u64) -> Result<()> {
        let mut disk = self.connect(nvme, round)?;
        loop {
            if let Err(error) = self.model.step(disk.as_mut(), &mut self.dice) {
                return match error.kind() {
                    io::ErrorKind::Other | io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                        Err(error).with_context(|| format!("session {}", self.number))
                    }
                    _ => Ok(()),
                };
            }
        }
    }

    fn verify(&mut self, node: &Node, protocol: u64) -> Result<()> {
        let mut disk = self.connect(node.nvme, protocol)?;
        self.model
            .check_after_crash(disk.as_mut())
            .with_context(|| format!("session {} after the restart", self.number))
    }

    /// Connects by iSCSI or NVMe/TCP, depending on the session's number and `turn`.
    fn connect(&self, nvme: SocketAddr, turn: u64) -> Result<Box<dyn BlockClient>> {
        let initiator = format!("iqn.2026-01.test:crash{}", self.number);
        let host = format!("nqn.2026-01.test:crash{}", self.number);
        let unit = &self.volume.unit;
        let lun = u8::try_from(unit.lun).context("an odd LUN")?;
        let connect = || -> io::Result<Box<dyn BlockClient>> {
            if (self.number / 2 + turn).is_multiple_of(2) {
                let isid = u32::try_from(self.number).unwrap_or(0) + 1;
                Ok(Box::new(Session::login(unit.portal, &initiator, &unit.target, lun, isid)?))
            } else {
                Ok(Box::new(Controller::connect(nvme, &host, &self.volume.subsystem.nqn)?))
            }
        };
        connect().with_context(|| format!("session {}: connect", self.number))
    }
}
