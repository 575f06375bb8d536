//! A host and a controller, and between them an attacker who keeps, changes, repeats and invents
//! messages as a script says, but does not know the secrets.

use std::num::NonZeroU32;
use std::sync::Arc;

use nvme::auth::{
    AuthPolicy, Config, ControllerAuthenticator, DhComputation, DhGroup, Hash, HostAuthenticator,
    HostStep, Secret, SequenceCounter, TransactionRandomness,
};

const SECRETS: [&str; 3] = [
    "DHHC-1:00:ERgfJi00O0JJUFdeZWxzeoGIj5adpKuyucDHztXc4+oQKkVI:",
    "DHHC-1:01:g4qRmJ+mrbS7wsnQ197l7PP6AQgPFh0kKzI5QEdOVVxwYX7k:",
    "DHHC-1:00:g4qRmJ+mrbS7wsnQ197l7PP6AQgPFh0kKzI5QEdOVVxwYX7k:",
];

/// Powers that one script is worth.
const MAX_WORK: usize = 6;

fn config(host: &str, controller: Option<&str>, groups: &[DhGroup]) -> Arc<Config> {
    let secret = |text| Secret::parse(text).expect("a secret");
    Arc::new(Config {
        host_nqn: "nqn.2014-08.org.nvmexpress:uuid:1".into(),
        subsystem_nqn: "nqn.2026-01.io.example:v".into(),
        host_secret: secret(host),
        controller_secret: controller.map(secret),
        policy: AuthPolicy::new(&Hash::ALL, groups).expect("not empty"),
    })
}

struct World {
    host: Arc<Config>,
    controller: Arc<Config>,
    prover: HostAuthenticator,
    responder: ControllerAuthenticator,
    to_controller: Vec<u8>,
    to_host: Vec<u8>,
    works: (Option<DhComputation>, Option<DhComputation>),
    worked: usize,
    sequence: SequenceCounter,
}

fn fresh(sequence: &mut SequenceCounter) -> TransactionRandomness {
    let number: NonZeroU32 = sequence.take();
    let [.., low] = number.get().to_be_bytes();
    TransactionRandomness::new(number, &[low; TransactionRandomness::LEN])
}

impl World {
    /// Either of the two may have the wrong secret.
    fn new(setting: u8) -> Self {
        let groups: &[DhGroup] =
            if setting & 1 == 0 { &[DhGroup::Null] } else { &[DhGroup::Ffdhe2048, DhGroup::Null] };
        let host = if setting & 2 == 0 { SECRETS[0] } else { SECRETS[2] };
        let controller = if setting & 4 == 0 { SECRETS[1] } else { SECRETS[2] };
        let host = config(host, (setting & 8 == 0).then_some(SECRETS[1]), groups);
        let controller = config(SECRETS[0], Some(controller), groups);
        let (prover, to_controller) = HostAuthenticator::start(host.clone(), u16::from(setting));
        Self {
            host,
            prover,
            controller,
            responder: ControllerAuthenticator::default(),
            to_controller,
            to_host: Vec::new(),
            works: (None, None),
            worked: 0,
            sequence: SequenceCounter::new(u32::from(setting)),
        }
    }

    fn next(&mut self, next: HostStep) {
        match next {
            HostStep::Send(message)
            | HostStep::Authenticated(Some(message))
            | HostStep::Failed(_, Some(message)) => {
                self.to_controller = message;
            }
            HostStep::Compute(work) => self.works.1 = Some(work),
            HostStep::Authenticated(None) | HostStep::Failed(_, None) => {}
        }
    }

    fn step(&mut self, op: u8, script: &mut impl Iterator<Item = u8>) {
        match op % 10 {
            0 => {
                let transaction = script.next().unwrap_or(0).into();
                (self.prover, self.to_controller) =
                    HostAuthenticator::start(self.host.clone(), transaction);
            }
            1 => {
                let config = Arc::clone(&self.controller);
                let begin = || (config, fresh(&mut self.sequence));
                let work = self.responder.on_send(&self.to_controller, begin);
                self.works.0 = work.or(self.works.0.take());
            }
            2 => match self.responder.on_receive(4096) {
                Ok(message) => self.to_host = message,
                Err(short) => panic!("{short}"),
            },
            3 => {
                let next = self.prover.receive(&self.to_host, || fresh(&mut self.sequence));
                self.next(next);
            }
            4 | 5 if self.worked == MAX_WORK => {}
            4 => {
                if let Some(work) = self.works.0.take() {
                    self.responder.on_computed(work.run());
                    self.worked += 1;
                }
            }
            5 => {
                if let Some(next) =
                    self.works.1.take().and_then(|work| self.prover.on_computed(work.run()))
                {
                    self.next(next);
                    self.worked += 1;
                }
            }
            6 => change(&mut self.to_controller, script),
            7 => change(&mut self.to_host, script),
            8 => self.to_host.clone_from(&self.to_controller),
            _ => {
                let room = usize::from(script.next().unwrap_or(0));
                if let Ok(message) = self.responder.on_receive(room) {
                    assert!(message.len() <= room);
                    self.to_host = message;
                }
            }
        }
    }
}

/// Changes, cuts off or adds to a message.
fn change(message: &mut Vec<u8>, script: &mut impl Iterator<Item = u8>) {
    let (at, by) = (usize::from(script.next().unwrap_or(0)), script.next().unwrap_or(1));
    match message.get_mut(at) {
        Some(byte) if by != 0 => *byte ^= by,
        Some(_) => message.truncate(at),
        None => message.push(by),
    }
}

/// Whether both have authenticated in the end.
pub(crate) fn run(script: &[u8]) -> bool {
    let mut script = script.iter().copied();
    let setting = script.next().unwrap_or(0);
    let mut world = World::new(setting);
    while let Some(op) = script.next() {
        world.step(op, &mut script);
        if world.responder.failure().is_some() {
            assert!(!world.responder.is_authenticated());
        }
        if setting & 2 != 0 {
            assert!(!world.responder.is_authenticated(), "the host does not know the secret");
        }
        if setting & 12 == 4 {
            assert!(!world.prover.is_authenticated(), "the controller does not know the secret");
        }
    }
    world.responder.is_authenticated() && world.prover.is_authenticated()
}
