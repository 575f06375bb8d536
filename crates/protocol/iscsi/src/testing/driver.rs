//! A driver with a disk in memory, which does everything at once.

use rt::buf::MemoryClass;
use rt::buf::{Account, BufferPool, Bufs, copy_in};

use crate::pdu::{LoginStatus, TaskOutcome};
use crate::target::{
    Action, ArrivedCommand, Auth, CommandOutcome, Connection, LoginGrant, SendTargetsScope,
    TargetRecord,
};

/// Size of a block in bytes.
pub const BLOCK: usize = 512;

/// A driver with a disk in memory.
#[derive(Debug)]
pub struct Driver {
    /// The disk's contents.
    pub disk: Vec<u8>,
    /// How initiators have to prove who they are.
    pub auth: Auth,
    /// Targets that are reported.
    pub targets: Vec<TargetRecord>,
    /// Handle of the next session.
    pub tsih: u16,
    account: Account,
    commands: Vec<Option<ArrivedCommand>>,
}

impl Driver {
    /// A driver with a disk of `blocks` and a buffer pool of `pool` bytes.
    ///
    /// # Panics
    /// If the system has no memory.
    #[must_use]
    pub fn new(blocks: usize, pool: usize) -> Self {
        let pool = BufferPool::new(pool).expect("the system has memory");
        Self {
            disk: (0..blocks * BLOCK).map(|i| (i / BLOCK + i % BLOCK) as u8).collect(),
            auth: Auth::None,
            targets: Vec::new(),
            tsih: 1,
            account: pool.account(),
            commands: Vec::new(),
        }
    }

    /// The pool that memory comes from.
    #[must_use]
    pub fn pool(&self) -> &BufferPool {
        self.account.buffer_pool()
    }

    /// Memory for `bytes`.
    ///
    /// # Panics
    /// If the pool is exhausted.
    #[must_use]
    pub fn memory(&self, bytes: usize) -> rt::buf::BufsMut {
        let credit = self.account.try_credit(bytes, MemoryClass::LocalIo);
        credit.expect("the pool of a test is large enough").alloc(bytes)
    }

    /// Buffers that hold `bytes`.
    ///
    /// # Panics
    /// If the pool is exhausted.
    #[must_use]
    pub fn data(&self, bytes: &[u8]) -> Bufs {
        let credit = self.account.try_credit(bytes.len(), MemoryClass::LocalIo);
        copy_in(&credit.expect("the pool of a test is large enough"), bytes)
    }

    /// What [`crate::target::Action::Login`] is answered with.
    #[must_use]
    pub fn login_grant(&self) -> LoginGrant {
        LoginGrant { auth: self.auth.clone(), portal_group: 1, target_alias: None, session: None }
    }

    /// Does one action; `false` for [`Action::Close`].
    pub fn act(&mut self, action: Action, target: &mut Connection) -> bool {
        match action {
            Action::Login(who) => {
                let known = who.target.is_none_or(|t| t.as_str().ends_with(":disk"));
                let grant = self.login_grant();
                target.login_decision(known.then_some(grant).ok_or(LoginStatus::NotFound.into()));
            }
            Action::Establish(session) => {
                let known = session.login.tsih == 0;
                target.session_established(
                    known.then_some(self.tsih).ok_or(LoginStatus::NoSession.into()),
                );
            }
            Action::SendTargets(scope) => {
                let wanted = |t: &&TargetRecord| match &scope {
                    SendTargetsScope::All | SendTargetsScope::Session => true,
                    SendTargetsScope::Named(name) => t.name == name.as_str(),
                };
                let records: Vec<_> = self.targets.iter().filter(wanted).cloned().collect();
                target.targets(&records);
            }
            Action::CommandArrived(command) => self.arrived(command, target),
            Action::Grant { tag, bytes, .. } => target.grant(tag, self.memory(bytes)),
            Action::Run { tag, data } => {
                if let Some(command) = self.commands[tag.0 as usize].take() {
                    self.run(&command, &data, target);
                }
            }
            Action::Abort { tag } => target.complete(tag, &CommandOutcome::status(0x40, &[])),
            Action::TaskManagement { id, .. } => {
                target.task_management_done(id, TaskOutcome::Complete);
            }
            Action::Close(_) => return false,
        }
        true
    }

    fn arrived(&mut self, command: ArrivedCommand, target: &mut Connection) {
        let tag = command.tag;
        let at = tag.0 as usize;
        if self.commands.len() <= at {
            self.commands.resize_with(at + 1, || None);
        }
        let (_, len) = extent(&command);
        let writes = command.cdb[0] == 0x2a;
        self.commands[at] = Some(command);
        target.admit(tag, if writes { len as u64 } else { 0 });
    }

    fn run(&mut self, command: &ArrivedCommand, data: &Bufs, target: &mut Connection) {
        let (at, len) = extent(command);
        match command.cdb[0] {
            0x00 => target.complete(command.tag, &CommandOutcome::default()),
            0x28 if at + len <= self.disk.len() => {
                let data = self.data(&self.disk[at..at + len]);
                target.complete(command.tag, &CommandOutcome::good(data));
            }
            0x2a if at + len <= self.disk.len() => {
                data.copy_to(&mut self.disk[at..at + data.len()]);
                target.complete(command.tag, &CommandOutcome::default());
            }
            _ => {
                let mut sense = [0; 18];
                (sense[0], sense[2], sense[7], sense[12]) = (0x70, 5, 10, 0x20);
                target.complete(command.tag, &CommandOutcome::status(2, &sense));
            }
        }
    }
}

/// Offset and length in bytes of READ (10) and WRITE (10).
fn extent(command: &ArrivedCommand) -> (usize, usize) {
    let [_, _, a, b, c, d, _, e, f, ..] = command.cdb;
    let at = u32::from_be_bytes([a, b, c, d]) as usize;
    (at * BLOCK, usize::from(u16::from_be_bytes([e, f])) * BLOCK)
}
