//! Features (NVMe Base 2.0, 5.27.1).

use std::collections::BTreeMap;

use block::BufsMut;

use super::Controller;
use super::admin::AdminAction;
use super::error_log::{CommandError, field};
use super::events::EventKind;
use super::page_writer::PageWriter;
use crate::entry::{Completion, NSID_ALL, Sqe};
use crate::status::Status;

wire::open_enum! {
    /// FID: feature identifier.
    pub(super) enum Feature: u8 {
        Arbitration = 0x01,
        Power = 0x02,
        TemperatureThreshold = 0x04,
        ErrorRecovery = 0x05,
        VolatileWriteCache = 0x06,
        Queues = 0x07,
        WriteAtomicity = 0x0a,
        AsyncEvents = 0x0b,
        KeepAlive = 0x0f,
        HostBehavior = 0x16,
        HostId = 0x81,
        ReservationMask = 0x82,
        ReservationPersistence = 0x83,
    }
}

/// All features of an I/O controller.
pub(super) const IO_FEATURES: [Feature; 13] = [
    Feature::Arbitration,
    Feature::Power,
    Feature::TemperatureThreshold,
    Feature::ErrorRecovery,
    Feature::VolatileWriteCache,
    Feature::Queues,
    Feature::WriteAtomicity,
    Feature::AsyncEvents,
    Feature::KeepAlive,
    Feature::HostBehavior,
    Feature::HostId,
    Feature::ReservationMask,
    Feature::ReservationPersistence,
];

/// Those of a discovery controller.
pub(super) const DISCOVERY_FEATURES: [Feature; 3] =
    [Feature::AsyncEvents, Feature::KeepAlive, Feature::HostId];

const HOST_BEHAVIOR_BYTES: u32 = 512;
const HOST_ID_BYTES: u32 = 16;

/// Capabilities (SEL 3): for a namespace, changeable.
const CAP_NAMESPACE: u64 = 1 << 1;
const CAP_CHANGEABLE: u64 = 1 << 2;

/// Default temperature thresholds: never reached.
const OVER_TEMPERATURE: u16 = 0xffff;

/// Value that Get Features returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Select {
    Current,
    /// No feature is saveable, so the saved value is the default.
    Default,
    Capabilities,
}

/// Values that the host has set.
#[derive(Debug)]
pub(super) struct Features {
    arbitration: u32,
    /// Over and under temperature threshold in kelvins.
    temperature: [u16; 2],
    /// TLER by namespace.
    error_recovery: BTreeMap<u32, u16>,
    write_cache: bool,
    /// Whether atomicity is required only at power failure (DN).
    disable_normal: bool,
    /// I/O queues that the host may use, 0's based.
    queues: Option<u16>,
    /// Advanced Command Retry Enable.
    acre: u8,
}

impl Default for Features {
    fn default() -> Self {
        Self {
            arbitration: 0,
            temperature: [OVER_TEMPERATURE, 0],
            error_recovery: BTreeMap::new(),
            write_cache: true,
            disable_normal: false,
            queues: None,
            acre: 0,
        }
    }
}

impl Features {
    /// Whether completed writes may be volatile.
    pub(super) fn write_cache(&self) -> bool {
        self.write_cache
    }
}

fn low_half(dword: u32) -> u16 {
    let [a, b, ..] = dword.to_le_bytes();
    u16::from_le_bytes([a, b])
}

/// Which of the two temperature thresholds dword 11 selects; only the composite temperature (TMPSEL
/// 0, or F for all) has any.
fn threshold(dword: u32) -> Result<usize, CommandError> {
    let sensor = dword >> 16 & 0xf;
    let which = dword >> 20 & 0b11;
    if (sensor != 0 && sensor != 0xf) || which > 1 {
        return Err(CommandError::field(field::CDW11 + 2));
    }
    Ok(which as usize)
}

impl Controller {
    /// The feature that dword 10 selects, if this kind of controller has it.
    fn feature(&self, sqe: &Sqe) -> Result<Feature, CommandError> {
        let [fid, ..] = sqe.cdw(0).to_le_bytes();
        let feature = Feature(fid);
        let known = if self.is_discovery() {
            DISCOVERY_FEATURES.contains(&feature)
        } else {
            IO_FEATURES.contains(&feature)
        };
        if known { Ok(feature) } else { Err(CommandError::field(field::CDW10)) }
    }

    /// A Set Features command has arrived.
    pub(super) fn set_features(&mut self, sqe: &Sqe) -> Result<AdminAction, CommandError> {
        let feature = self.feature(sqe)?;
        if sqe.cdw(0) & 1 << 31 != 0 {
            return Err(CommandError::at(Status::FEATURE_NOT_SAVEABLE, field::CDW10 + 3));
        }
        if feature == Feature::HostBehavior {
            Self::check_exact_length(sqe, HOST_BEHAVIOR_BYTES)?;
            return Ok(AdminAction::Receive { bytes: HOST_BEHAVIOR_BYTES });
        }
        if feature == Feature::ReservationPersistence {
            let nsid = sqe.nsid.get();
            self.namespaces_with_reservations(nsid, true)?;
            return Ok(AdminAction::SetPersistence { nsid, persist: sqe.cdw(1) & 1 != 0 });
        }
        let result = self.set_feature(feature, sqe)?;
        if feature == Feature::VolatileWriteCache && !self.features.write_cache {
            // Once this completes, the host assumes its writes are durable; flush even if the cache
            // is already off, as the earlier flush may be in progress or have failed.
            return Ok(AdminAction::Flush);
        }
        Ok(AdminAction::Complete(Completion::ok(result)))
    }

    fn set_feature(&mut self, feature: Feature, sqe: &Sqe) -> Result<u64, CommandError> {
        let value = sqe.cdw(1);
        match feature {
            Feature::Arbitration => self.features.arbitration = value,
            Feature::Power => {
                if value & 0x1f != 0 {
                    return Err(CommandError::field(field::CDW11));
                }
            }
            Feature::TemperatureThreshold => {
                self.features.temperature[threshold(value)?] = low_half(value);
            }
            Feature::ErrorRecovery => self.set_error_recovery(sqe.nsid.get(), value)?,
            Feature::VolatileWriteCache => self.features.write_cache = value & 1 != 0,
            Feature::Queues => return self.set_queues(value),
            Feature::WriteAtomicity => self.features.disable_normal = value & 1 != 0,
            Feature::AsyncEvents => self.set_async_events(value)?,
            Feature::KeepAlive => self.keep_alive.set_kato_ms(value),
            Feature::ReservationMask => self.set_notification_mask(sqe.nsid.get(), value)?,
            // Over fabrics the host identifier comes with Connect (NVMe Base 2.0, 5.27.1.25).
            Feature::HostId => {
                return Err(CommandError::at(Status::COMMAND_SEQUENCE, field::CDW10));
            }
            _ => return Err(CommandError::field(field::CDW10)),
        }
        Ok(0)
    }

    fn set_error_recovery(&mut self, nsid: u32, value: u32) -> Result<(), CommandError> {
        const DULBE: u32 = 1 << 16;
        if value & DULBE != 0 {
            return Err(CommandError::field(field::CDW11 + 2));
        }
        let limit = low_half(value);
        if nsid == NSID_ALL {
            for nsid in self.namespaces.keys() {
                self.features.error_recovery.insert(*nsid, limit);
            }
            return Ok(());
        }
        self.valid_namespace(nsid)?.ok_or(CommandError::field(field::NSID))?;
        self.features.error_recovery.insert(nsid, limit);
        Ok(())
    }

    /// Number of Queues: grants the request up to the limit. Only before the first I/O queue is
    /// connected.
    fn set_queues(&mut self, value: u32) -> Result<u64, CommandError> {
        if self.io_queues() > 0 {
            return Err(CommandError::at(Status::COMMAND_SEQUENCE, field::CDW10));
        }
        let asked = [low_half(value), low_half(value >> 16)];
        if asked.contains(&u16::MAX) {
            return Err(CommandError::field(field::CDW11));
        }
        let granted = asked[0].max(asked[1]).min(self.limits.io_queues - 1);
        self.features.queues = Some(granted);
        Ok(self.queues_granted())
    }

    fn queues_granted(&self) -> u64 {
        let n = u64::from(self.features.queues.unwrap_or(self.limits.io_queues - 1));
        n | n << 16
    }

    fn set_async_events(&mut self, value: u32) -> Result<(), CommandError> {
        const CRITICAL_WARNINGS: u32 = 0xff;
        let events = if self.is_discovery() {
            EventKind::Discovery.bit()
        } else {
            CRITICAL_WARNINGS | EventKind::Namespaces.bit() | EventKind::Ana.bit()
        };
        if value & !events != 0 {
            return Err(CommandError::field(field::CDW11));
        }
        self.events.configure(value);
        Ok(())
    }

    /// The data of Set Features: Host Behavior Support.
    pub(super) fn set_features_data(
        &mut self,
        sqe: &Sqe,
        data: &[u8],
    ) -> Result<Completion, CommandError> {
        if self.feature(sqe)? != Feature::HostBehavior {
            return Err(CommandError::field(field::CDW10));
        }
        // ACRE is all that is supported: no ETDAS, no LBAFEE.
        let [acre, 0, 0, ..] = *data else { return Err(CommandError::field(field::CDW10)) };
        if acre > 1 {
            return Err(CommandError::field(field::CDW10));
        }
        self.features.acre = acre;
        Ok(Completion::OK)
    }

    /// A Get Features command has arrived.
    pub(super) fn get_features(&self, sqe: &Sqe) -> Result<AdminAction, CommandError> {
        let feature = self.feature(sqe)?;
        let select = match sqe.cdw(0) >> 8 & 0b111 {
            0 => Select::Current,
            1 | 2 => Select::Default,
            3 => Select::Capabilities,
            _ => return Err(CommandError::field(field::CDW10 + 1)),
        };
        if select == Select::Capabilities {
            return Ok(AdminAction::Complete(Completion::ok(capabilities(feature))));
        }
        if let Some(bytes) = data_bytes(feature) {
            Self::check_exact_length(sqe, bytes)?;
            return Ok(AdminAction::Produce { bytes });
        }
        if feature == Feature::ReservationPersistence && select == Select::Current {
            let nsid = sqe.nsid.get();
            self.namespaces_with_reservations(nsid, false)?;
            return Ok(AdminAction::GetPersistence { nsid });
        }
        let result = self.get_feature(feature, select, sqe)?;
        Ok(AdminAction::Complete(Completion::ok(result)))
    }

    fn get_feature(
        &self,
        feature: Feature,
        select: Select,
        sqe: &Sqe,
    ) -> Result<u64, CommandError> {
        let default = Features::default();
        let of = if select == Select::Default { &default } else { &self.features };
        let current = select == Select::Current;
        Ok(match feature {
            Feature::Arbitration => of.arbitration.into(),
            Feature::Power => 0,
            Feature::TemperatureThreshold => of.temperature[threshold(sqe.cdw(1))?].into(),
            Feature::ErrorRecovery => {
                let nsid = sqe.nsid.get();
                self.valid_namespace(nsid)?.ok_or(CommandError::field(field::NSID))?;
                of.error_recovery.get(&nsid).copied().unwrap_or(0).into()
            }
            Feature::VolatileWriteCache => of.write_cache.into(),
            Feature::Queues => self.queues_granted(),
            Feature::WriteAtomicity => of.disable_normal.into(),
            Feature::AsyncEvents => if current { self.events.config() } else { 0 }.into(),
            Feature::ReservationMask => {
                self.namespaces_with_reservations(sqe.nsid.get(), false)?;
                if current { self.reservation_log.mask(sqe.nsid.get()) } else { 0 }.into()
            }
            Feature::ReservationPersistence => {
                self.namespaces_with_reservations(sqe.nsid.get(), false)?;
                0
            }
            Feature::KeepAlive => if current { self.keep_alive.kato_ms() } else { 0 }.into(),
            _ => return Err(CommandError::field(field::CDW10)),
        })
    }

    /// Data of Get Features: Host Behavior Support and Host Identifier.
    pub(super) fn produce_features(
        &self,
        sqe: &Sqe,
        buffers: &mut BufsMut,
    ) -> Result<Completion, CommandError> {
        let current = sqe.cdw(0) >> 8 & 0b111 == 0;
        let mut window = PageWriter::new(0, buffers);
        match self.feature(sqe)? {
            Feature::HostBehavior if current => window.put(0, &[self.features.acre]),
            Feature::HostBehavior => {}
            Feature::HostId => {
                // EXHID: fabrics know 128-bit identifiers only.
                if sqe.cdw(1) & 1 == 0 {
                    return Err(CommandError::field(field::CDW11));
                }
                window.put(0, &self.host_id);
            }
            _ => return Err(CommandError::field(field::CDW10)),
        }
        Ok(Completion::OK)
    }
}

/// Length of the data that Get Features returns.
fn data_bytes(feature: Feature) -> Option<u32> {
    match feature {
        Feature::HostBehavior => Some(HOST_BEHAVIOR_BYTES),
        Feature::HostId => Some(HOST_ID_BYTES),
        _ => None,
    }
}

fn capabilities(feature: Feature) -> u64 {
    match feature {
        Feature::HostId => 0,
        Feature::ErrorRecovery | Feature::ReservationMask | Feature::ReservationPersistence => {
            CAP_CHANGEABLE | CAP_NAMESPACE
        }
        _ => CAP_CHANGEABLE,
    }
}
