//! A well-behaved session that works during the attacks and records its service quality.

use crate::server::IscsiLun;
use anyhow::{Context, Result, anyhow};
use probe::{
    iscsi::Session,
    registers::{RegisterModel, SeededRng},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Blocks the client works on.
const BLOCKS: usize = 2048;
/// A pause between steps: it is a client, not a load.
const PAUSE: Duration = Duration::from_millis(1);

/// How the client was served.
#[derive(Clone, Debug, Default)]
pub(super) struct ServiceQuality {
    latencies: Vec<Duration>,
}

impl ServiceQuality {
    pub(super) fn steps(&self) -> usize {
        self.latencies.len()
    }

    pub(super) fn worst(&self) -> Duration {
        self.latencies.iter().max().copied().unwrap_or(Duration::MAX)
    }

    pub(super) fn median(&self) -> Duration {
        let mut sorted = self.latencies.clone();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied().unwrap_or(Duration::MAX)
    }
}

/// A running well-behaved client.
pub(super) struct WellBehavedClient {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<ServiceQuality>>,
}

impl WellBehavedClient {
    /// Logs in to `unit`, whose first blocks it overwrites, and works until it is stopped.
    pub(super) fn start(unit: &IscsiLun, seed: u64) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let lun = u8::try_from(unit.lun).context("an odd LUN")?;
        let mut session =
            Session::login(unit.portal, "iqn.2026-01.test:witness", &unit.target, lun, 1)
                .context("the witness cannot log in")?;
        let asked = stop.clone();
        let thread = std::thread::spawn(move || {
            let (mut model, mut dice) = (RegisterModel::new(seed, 0, BLOCKS), SeededRng::new(seed));
            wipe(&mut session)?;
            let mut served = ServiceQuality::default();
            while !asked.load(Ordering::Relaxed) {
                let begun = Instant::now();
                model.step(&mut session, &mut dice).context("the witness was disturbed")?;
                served.latencies.push(begun.elapsed());
                std::thread::sleep(PAUSE);
            }
            session.logout().context("the witness could not log out")?;
            Ok(served)
        });
        Ok(Self { stop, thread })
    }

    /// Stops the client; returns an error if it met one.
    pub(super) fn end(self) -> Result<ServiceQuality> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the witness panicked"))?
    }
}

fn wipe(session: &mut Session) -> Result<()> {
    use probe::BlockClient;
    let zeroes = vec![0; session.block_bytes() * 256];
    for lba in (0..BLOCKS as u64).step_by(256) {
        session.write(lba, &zeroes, true).context("the witness cannot write")?;
    }
    Ok(())
}
