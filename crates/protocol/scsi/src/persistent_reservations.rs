//! PERSISTENT RESERVE IN and OUT (SPC-4 6.15, 6.16), RESERVE and RELEASE of the whole unit (SPC-2
//! 7.21, 7.17), and the unit attentions for changes of reservations. The crate `reservation`
//! defines their effect, and the driver executes them, because all nodes that serve a volume share
//! one table.
//!
//! RESERVE and RELEASE of third parties and extents are not supported; their fields are rejected as
//! reserved bits.

use reservation::{Notification, Notifications};

use crate::command::{AdmittedCommand, AdmittedOp, Outcome, ParsedCommand};
use crate::nexus::{AttentionScope, NexusId, UnitAttention};
use crate::reply::{Refusal, TransferLengths};
use crate::reservation_encoding::{
    PARAMETER_LIST_LENGTH, ReserveInAction, ReserveOutList, parse_reserve_out,
};
use crate::unit::LogicalUnit;

/// READ KEYS.
pub(crate) fn read_keys(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    Ok(unit.accept_reserve_in(ReserveInAction::Keys, cmd))
}

/// READ RESERVATION.
pub(crate) fn read_reservation(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    Ok(unit.accept_reserve_in(ReserveInAction::Reservation, cmd))
}

/// READ FULL STATUS.
pub(crate) fn read_full_status(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    Ok(unit.accept_reserve_in(ReserveInAction::FullStatus, cmd))
}

/// REPORT CAPABILITIES (SPC-4 6.15.4).
pub(crate) fn report_capabilities(
    _unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    const CRH: u8 = 0x10;
    const SIP_C: u8 = 0x08;
    const ATP_C: u8 = 0x04;
    const PTPL_C: u8 = 0x01;
    const TMV: u8 = 0x80;
    /// Cases that the standard leaves open: TEST UNIT READY is allowed, MODE SENSE as reads are.
    const ALLOW_COMMANDS: u8 = 0x00;
    /// All six types.
    const TYPES: [u8; 2] = [0xea, 0x01];
    let data =
        vec![0, 8, CRH | SIP_C | ATP_C | PTPL_C, TMV | ALLOW_COMMANDS, TYPES[0], TYPES[1], 0, 0];
    Ok(Outcome::data(data, u64::from(cmd.cdb.u16(7))))
}

/// PERSISTENT RESERVE OUT, with any service action.
pub(crate) fn persistent_reserve_out(
    unit: &mut LogicalUnit,
    cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    let order = parse_reserve_out(cmd.cdb)?;
    let length = cmd.cdb.u32(5);
    if length < size_of::<ReserveOutList>() as u32 {
        return Err(PARAMETER_LIST_LENGTH.into());
    }
    unit.accept_list(AdmittedOp::PersistentReserveOut(order), length, cmd)
}

/// RESERVE(6), (10).
pub(crate) fn reserve(
    unit: &mut LogicalUnit,
    _cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    Ok(unit.accept(AdmittedOp::Spc2Reserve))
}

/// RELEASE(6), (10): without effect from any nexus but the holder, which is no error.
pub(crate) fn release(
    unit: &mut LogicalUnit,
    _cmd: &ParsedCommand<'_>,
) -> Result<Outcome, Refusal> {
    Ok(unit.accept(AdmittedOp::Spc2Release))
}

/// The unit attention for a notification.
fn unit_attention(notification: Notification) -> UnitAttention {
    match notification {
        Notification::TargetReset => UnitAttention::TargetReset,
        Notification::UnitReset => UnitAttention::UnitReset,
        Notification::ModePagesChanged => UnitAttention::ModeChanged,
        Notification::ReservationsPreempted => UnitAttention::ReservationsPreempted,
        Notification::ReservationsReleased => UnitAttention::ReservationsReleased,
        Notification::RegistrationsPreempted => UnitAttention::RegistrationsPreempted,
        Notification::AbortCommands => UnitAttention::CommandsCleared,
    }
}

impl LogicalUnit {
    /// The shared state has changed: raises unit attentions for this initiator. Returns whether its
    /// commands in flight must be aborted.
    pub fn notify(&mut self, nexus: NexusId, notifications: Notifications) -> bool {
        let is_reset =
            [Notification::UnitReset, Notification::TargetReset].map(|n| notifications.contains(n));
        let is_reset = is_reset.contains(&true);
        if is_reset {
            self.reset();
        }
        notifications.iter().for_each(|notification| {
            self.establish_attention(AttentionScope::Only(nexus), unit_attention(notification));
        });
        is_reset || notifications.contains(Notification::AbortCommands)
    }

    /// Accepts a query of the shared state.
    fn accept_reserve_in(&self, in_action: ReserveInAction, cmd: &ParsedCommand<'_>) -> Outcome {
        let allocation = cmd.cdb.u16(7);
        let wanted = TransferLengths::to_initiator(u64::from(allocation));
        let command = AdmittedCommand {
            op: AdmittedOp::PersistentReserveIn { action: in_action, allocation },
            data_out: 0,
            data_in: 0,
            read_back: 0,
            full_transfer: wanted,
            expected_data_in: cmd.expected_transfer.data_in,
        };
        Outcome::Accept(command)
    }
}
