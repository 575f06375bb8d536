//! Get Features and Set Features (NVMe Base 2.0, 5.15 and 5.27).

use std::time::Duration;

use super::{Admin, Controller, MAX_IO_QUEUES};
use crate::Status;
use crate::entry::{Completion, Sqe};

wire::open_enum! {
    /// Features that there are.
    enum Feature: u8 {
        Arbitration = 0x01,
        PowerManagement = 0x02,
        TemperatureThreshold = 0x04,
        ErrorRecovery = 0x05,
        WriteCache = 0x06,
        Queues = 0x07,
        AsyncEvents = 0x0b,
        KeepAlive = 0x0f,
        HostIdentifier = 0x81,
    }
}

/// Number of queues as the feature has it: submission and completion queues, from 0.
fn queues(asked: u32) -> u64 {
    let most = u32::from(MAX_IO_QUEUES) - 1;
    let each = (asked & 0xffff).min(asked >> 16).min(most);
    u64::from(each | each << 16)
}

impl Controller {
    pub(super) fn get_features(&self, sqe: &Sqe) -> Admin {
        let [id, select, ..] = sqe.cdw(0).to_le_bytes();
        let feature = Feature(id);
        // SEL: current and default values; nothing is saved; what is supported.
        match select & 0x7 {
            0 | 1 => {}
            3 => return self.supported(feature),
            _ => return Admin::failed(Status::INVALID_FIELD.do_not_retry()),
        }
        let value = match feature {
            Feature::Arbitration
            | Feature::PowerManagement
            | Feature::TemperatureThreshold
            | Feature::ErrorRecovery => 0,
            Feature::WriteCache => 1,
            Feature::Queues => queues(u32::MAX),
            Feature::AsyncEvents => u64::from(self.event_mask),
            Feature::KeepAlive => self.keep_alive.as_millis() as u64,
            Feature::HostIdentifier if sqe.cdw(1) & 1 == 1 => {
                return Admin::Done(Completion::OK, self.host.to_vec());
            }
            _ => return Admin::failed(Status::INVALID_FIELD.do_not_retry()),
        };
        Admin::Done(Completion::ok(value), Vec::new())
    }

    /// Capabilities (figure 196): bit 2, changeable.
    #[expect(clippy::unused_self, reason = "one of the handlers of a controller's features")]
    fn supported(&self, feature: Feature) -> Admin {
        let changeable =
            matches!(feature, Feature::Queues | Feature::AsyncEvents | Feature::KeepAlive);
        Admin::Done(Completion::ok(u64::from(changeable) << 2), Vec::new())
    }

    pub(super) fn set_features(&mut self, sqe: &Sqe) -> Admin {
        let [id, ..] = sqe.cdw(0).to_le_bytes();
        let (value, save) = (sqe.cdw(1), sqe.cdw(0) >> 31 == 1);
        if save {
            return Admin::failed(Status::FEATURE_NOT_SAVEABLE.do_not_retry());
        }
        match Feature(id) {
            Feature::Queues => {
                if value & 0xffff == 0xffff || value >> 16 == 0xffff {
                    return Admin::failed(Status::INVALID_FIELD.do_not_retry());
                }
                Admin::Done(Completion::ok(queues(value)), Vec::new())
            }
            Feature::AsyncEvents => {
                self.event_mask = value;
                Admin::OK
            }
            Feature::KeepAlive => {
                self.keep_alive = Duration::from_millis(u64::from(value));
                Admin::OK
            }
            Feature::WriteCache if value & 1 == 0 => {
                Admin::failed(Status::FEATURE_NOT_CHANGEABLE.do_not_retry())
            }
            Feature::Arbitration
            | Feature::PowerManagement
            | Feature::TemperatureThreshold
            | Feature::ErrorRecovery
            | Feature::WriteCache => Admin::OK,
            _ => Admin::failed(Status::INVALID_FIELD.do_not_retry()),
        }
    }
}
