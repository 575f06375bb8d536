//! Features (NVMe Base 2.0, 5.27.1).

use std::collections::BTreeMap;

use block::BufsMut;

use super::Controller;
use super::admin::Verdict;
use super::errors::{Fault, field};
use super::events::Kind;
use super::window::Window;
use crate::entry::{Completion, NSID_ALL, Sqe};
use crate::status::Status;

wire::open_enum! {
    /// FID: which feature.
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

/// Temperature thresholds at first: never reached.
const OVER_TEMPERATURE: u16 = 0xffff;

/// Which value Get Features wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Select {
    Current,
    /// Nothing can be saved, so the saved value is the default.
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
    /// Whether atomicity need only hold at power failure (DN).
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

/// Which of the two temperature thresholds dword 11 means; only the composite temperature
/// (TMPSEL 0, or F for all) has any.
fn threshold(dword: u32) -> Result<usize, Fault> {
    let sensor = dword >> 16 & 0xf;
    let which = dword >> 20 & 0b11;
    if (sensor != 0 && sensor != 0xf) || which > 1 {
        return Err(Fault::field(field::CDW11 + 2));
    }
    Ok(which as usize)
}

impl Controller {
    /// The feature that dword 10 names, if this kind of controller has it.
    fn feature(&self, sqe: &Sqe) -> Result<Feature, Fault> {
        let [fid, ..] = sqe.cdw(0).to_le_bytes();
        let feature = Feature(fid);
        let known = if self.is_discovery() {
            DISCOVERY_FEATURES.contains(&feature)
        } else {
            IO_FEATURES.contains(&feature)
        };
        if known { Ok(feature) } else { Err(Fault::field(field::CDW10)) }
    }

    /// A Set Features command has arrived.
    pub(super) fn set_features(&mut self, sqe: &Sqe) -> Result<Verdict, Fault> {
        let feature = self.feature(sqe)?;
        if sqe.cdw(0) & 1 << 31 != 0 {
            return Err(Fault::at(Status::FEATURE_NOT_SAVEABLE, field::CDW10 + 3));
        }
        if feature == Feature::HostBehavior {
            Self::exact_length(sqe, HOST_BEHAVIOR_BYTES)?;
            return Ok(Verdict::Receive { bytes: HOST_BEHAVIOR_BYTES });
        }
        if feature == Feature::ReservationPersistence {
            let nsid = sqe.nsid.get();
            self.keepers(nsid, true)?;
            return Ok(Verdict::Persist { nsid, persists: sqe.cdw(1) & 1 != 0 });
        }
        let result = self.set_feature(feature, sqe)?;
        if feature == Feature::VolatileWriteCache && !self.features.write_cache {
            // Once that is answered the host takes what it has written for durable; also where the
            // cache is off already, because the flush for that may be on its way or have failed.
            return Ok(Verdict::Flush);
        }
        Ok(Verdict::Complete(Completion::ok(result)))
    }

    fn set_feature(&mut self, feature: Feature, sqe: &Sqe) -> Result<u64, Fault> {
        let value = sqe.cdw(1);
        match feature {
            Feature::Arbitration => self.features.arbitration = value,
            Feature::Power => {
                if value & 0x1f != 0 {
                    return Err(Fault::field(field::CDW11));
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
            Feature::KeepAlive => self.alive.set_kato_ms(value),
            Feature::ReservationMask => self.mask_notices(sqe.nsid.get(), value)?,
            // Over fabrics the host identifier comes with Connect (NVMe Base 2.0, 5.27.1.25).
            Feature::HostId => return Err(Fault::at(Status::COMMAND_SEQUENCE, field::CDW10)),
            _ => return Err(Fault::field(field::CDW10)),
        }
        Ok(0)
    }

    fn set_error_recovery(&mut self, nsid: u32, value: u32) -> Result<(), Fault> {
        const DULBE: u32 = 1 << 16;
        if value & DULBE != 0 {
            return Err(Fault::field(field::CDW11 + 2));
        }
        let limit = low_half(value);
        if nsid == NSID_ALL {
            for nsid in self.namespaces.keys() {
                self.features.error_recovery.insert(*nsid, limit);
            }
            return Ok(());
        }
        self.valid(nsid)?.ok_or(Fault::field(field::NSID))?;
        self.features.error_recovery.insert(nsid, limit);
        Ok(())
    }

    /// Number of Queues: the host is given what it asks for, up to the limit. Only before the
    /// first I/O queue is connected.
    fn set_queues(&mut self, value: u32) -> Result<u64, Fault> {
        if self.io_queues() > 0 {
            return Err(Fault::at(Status::COMMAND_SEQUENCE, field::CDW10));
        }
        let asked = [low_half(value), low_half(value >> 16)];
        if asked.contains(&u16::MAX) {
            return Err(Fault::field(field::CDW11));
        }
        let granted = asked[0].max(asked[1]).min(self.limits.io_queues - 1);
        self.features.queues = Some(granted);
        Ok(self.queues_granted())
    }

    fn queues_granted(&self) -> u64 {
        let n = u64::from(self.features.queues.unwrap_or(self.limits.io_queues - 1));
        n | n << 16
    }

    fn set_async_events(&mut self, value: u32) -> Result<(), Fault> {
        const CRITICAL_WARNINGS: u32 = 0xff;
        let events = if self.is_discovery() {
            Kind::Discovery.bit()
        } else {
            CRITICAL_WARNINGS | Kind::Namespaces.bit() | Kind::Ana.bit()
        };
        if value & !events != 0 {
            return Err(Fault::field(field::CDW11));
        }
        self.events.configure(value);
        Ok(())
    }

    /// The data of Set Features: Host Behavior Support.
    pub(super) fn set_features_data(
        &mut self,
        sqe: &Sqe,
        data: &[u8],
    ) -> Result<Completion, Fault> {
        if self.feature(sqe)? != Feature::HostBehavior {
            return Err(Fault::field(field::CDW10));
        }
        // ACRE is all that is supported: no ETDAS, no LBAFEE.
        let [acre, 0, 0, ..] = *data else { return Err(Fault::field(field::CDW10)) };
        if acre > 1 {
            return Err(Fault::field(field::CDW10));
        }
        self.features.acre = acre;
        Ok(Completion::OK)
    }

    /// A Get Features command has arrived.
    pub(super) fn get_features(&self, sqe: &Sqe) -> Result<Verdict, Fault> {
        let feature = self.feature(sqe)?;
        let select = match sqe.cdw(0) >> 8 & 0b111 {
            0 => Select::Current,
            1 | 2 => Select::Default,
            3 => Select::Capabilities,
            _ => return Err(Fault::field(field::CDW10 + 1)),
        };
        if select == Select::Capabilities {
            return Ok(Verdict::Complete(Completion::ok(capabilities(feature))));
        }
        if let Some(bytes) = data_bytes(feature) {
            Self::exact_length(sqe, bytes)?;
            return Ok(Verdict::Produce { bytes });
        }
        if feature == Feature::ReservationPersistence && select == Select::Current {
            let nsid = sqe.nsid.get();
            self.keepers(nsid, false)?;
            return Ok(Verdict::TellPersistence { nsid });
        }
        let result = self.get_feature(feature, select, sqe)?;
        Ok(Verdict::Complete(Completion::ok(result)))
    }

    fn get_feature(&self, feature: Feature, select: Select, sqe: &Sqe) -> Result<u64, Fault> {
        let default = Features::default();
        let of = if select == Select::Default { &default } else { &self.features };
        let current = select == Select::Current;
        Ok(match feature {
            Feature::Arbitration => of.arbitration.into(),
            Feature::Power => 0,
            Feature::TemperatureThreshold => of.temperature[threshold(sqe.cdw(1))?].into(),
            Feature::ErrorRecovery => {
                let nsid = sqe.nsid.get();
                self.valid(nsid)?.ok_or(Fault::field(field::NSID))?;
                of.error_recovery.get(&nsid).copied().unwrap_or(0).into()
            }
            Feature::VolatileWriteCache => of.write_cache.into(),
            Feature::Queues => self.queues_granted(),
            Feature::WriteAtomicity => of.disable_normal.into(),
            Feature::AsyncEvents => if current { self.events.config() } else { 0 }.into(),
            Feature::ReservationMask => {
                self.keepers(sqe.nsid.get(), false)?;
                if current { self.told.mask(sqe.nsid.get()) } else { 0 }.into()
            }
            Feature::ReservationPersistence => {
                self.keepers(sqe.nsid.get(), false)?;
                0
            }
            Feature::KeepAlive => if current { self.alive.kato_ms() } else { 0 }.into(),
            _ => return Err(Fault::field(field::CDW10)),
        })
    }

    /// Data of Get Features: Host Behavior Support and Host Identifier.
    pub(super) fn produce_features(
        &self,
        sqe: &Sqe,
        buffers: &mut BufsMut,
    ) -> Result<Completion, Fault> {
        let current = sqe.cdw(0) >> 8 & 0b111 == 0;
        let mut window = Window::new(0, buffers);
        match self.feature(sqe)? {
            Feature::HostBehavior if current => window.put(0, &[self.features.acre]),
            Feature::HostBehavior => {}
            Feature::HostId => {
                // EXHID: fabrics know 128-bit identifiers only.
                if sqe.cdw(1) & 1 == 0 {
                    return Err(Fault::field(field::CDW11));
                }
                window.put(0, &self.host_id);
            }
            _ => return Err(Fault::field(field::CDW10)),
        }
        Ok(Completion::OK)
    }
}

/// How many bytes Get Features returns as data.
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
