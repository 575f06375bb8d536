//! An iSCSI initiator on a socket.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use iscsi::pdu::{LoginStage, Opcode};
use iscsi::testing::{Pdu, ScriptedInitiator};
use rt::Core;
use rt::net::Stream;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(20);

/// One connection of an initiator, and its session.
pub(crate) struct Client {
    pub(crate) stream: Stream,
    pub(crate) initiator: ScriptedInitiator,
    pub(crate) pdus: VecDeque<Pdu>,
}

impl Client {
    pub(crate) async fn dial(core: &Core, to: SocketAddr, isid: u8) -> Self {
        let mut initiator = ScriptedInitiator::default();
        initiator.isid[5] = isid;
        let stream = core.dial(to).await.unwrap();
        Self { stream, initiator, pdus: VecDeque::new() }
    }

    /// Asks for a session.
    pub(crate) async fn ask_at(&mut self, target: &str, keys: &[(&str, &str)]) {
        let names = [
            ("InitiatorName", "iqn.2026-01.com.example:host"),
            ("TargetName", target),
            ("SessionType", "Normal"),
        ];
        let all: Vec<_> = names.iter().chain(keys).copied().collect();
        let login =
            self.initiator.login(LoginStage::Operational, Some(LoginStage::FullFeature), &all);
        self.send(&login).await;
    }

    pub(crate) async fn log_in_at(
        core: &Core,
        to: SocketAddr,
        isid: u8,
        target: &str,
        keys: &[(&str, &str)],
    ) -> Self {
        let mut client = Self::dial(core, to, isid).await;
        client.ask_at(target, keys).await;
        let answer = client.next().await;
        assert_eq!(answer.header[36..38], [0, 0], "{answer:?}");
        // TEST UNIT READY fetches the attention of a new initiator.
        let ready = client.initiator.command(&[0; 6], 0, 0, &[]);
        client.send(&ready).await;
        client.next().await;
        client
    }

    pub(crate) async fn send(&mut self, bytes: &[u8]) {
        timeout(PATIENCE, self.stream.write_all(bytes)).await.expect("it reads").unwrap();
    }

    pub(crate) async fn next(&mut self) -> Pdu {
        timeout(PATIENCE, self.receive()).await.expect("an answer in time").expect("an answer")
    }

    /// `None` when the server has closed the connection.
    pub(crate) async fn receive(&mut self) -> Option<Pdu> {
        let mut bytes = vec![0; 1 << 16];
        loop {
            if let Some(pdu) = self.pdus.pop_front() {
                return Some(pdu);
            }
            let n = self.stream.read(&mut bytes).await.ok().filter(|n| *n > 0)?;
            self.pdus.extend(self.initiator.receive(&bytes[..n]));
        }
    }

    /// A command that brings nothing: its status, and its data or sense data.
    pub(crate) async fn ask_for(&mut self, cdb: &[u8], bytes: u32) -> (u8, Vec<u8>) {
        let read = if bytes > 0 { 0x40 } else { 0 };
        let command = self.initiator.command(cdb, read, bytes, &[]);
        self.send(&command).await;
        let mut data = Vec::new();
        loop {
            let pdu = self.next().await;
            match pdu.opcode() {
                Opcode::DataIn => data.extend(&pdu.data),
                _ => data.extend(pdu.data.get(2..).unwrap_or_default()),
            }
            // The S bit of Data-In: the status is in it (RFC 7143 11.7.3).
            if pdu.opcode() != Opcode::DataIn || pdu.header[1] & 1 != 0 {
                return (pdu.header[3], data);
            }
        }
    }
}
