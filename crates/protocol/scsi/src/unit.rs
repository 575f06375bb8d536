//! The logical unit: the state that all its initiators share.

use block::Info;

use crate::limits::Limits;
use crate::mode_parameters::ModeParameters;
use crate::nexus::{AttentionScope, Nexus, NexusId, Nexuses, TooManyNexuses, UnitAttention};
use crate::port_groups::PortGroups;
use crate::sense::SenseFormat;
use crate::space::ThinSpace;

/// The fixed properties of a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitConfig {
    /// Identity of the volume; the same on every node that serves it.
    pub uuid: [u8; 16],
    /// PRODUCT IDENTIFICATION: at most 16 printable ASCII characters.
    pub product: String,
    /// PRODUCT REVISION LEVEL: at most 4 printable ASCII characters.
    pub revision: String,
    /// PRODUCT SERIAL NUMBER: at most 64 printable ASCII characters.
    pub serial: String,
    /// Whether writes are refused even if the device accepts them.
    pub read_only: bool,
    /// Whether it is thinly provisioned.
    pub thin: bool,
    /// Whether it is non-rotational.
    pub solid_state: bool,
    /// Most blocks that one command may move; a smaller limit of the device prevails.
    pub max_transfer_blocks: u32,
    /// Whether it supports persistent reservations, shared by all nodes that serve it.
    pub keeps_reservations: bool,
}

/// The features of a unit that not all have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UnitCapabilities {
    /// Logical block provisioning management.
    pub(crate) can_unmap: bool,
    /// Target port groups.
    pub(crate) has_port_groups: bool,
    /// Reservations shared by all nodes.
    pub(crate) keeps_reservations: bool,
    /// Atomic writes.
    pub(crate) writes_atomically: bool,
}

/// One volume as its initiators see it.
#[derive(Debug)]
pub struct LogicalUnit {
    pub(crate) config: UnitConfig,
    pub(crate) info: Info,
    pub(crate) limits: Limits,
    pub(crate) modes: ModeParameters,
    pub(crate) nexuses: Nexuses,
    pub(crate) stopped: bool,
    /// Target port groups, if several nodes serve the unit.
    pub(crate) groups: Option<PortGroups>,
    /// Used and available space, if known.
    pub(crate) space: Option<ThinSpace>,
}

impl LogicalUnit {
    /// A unit that is ready, with default mode pages and no initiators.
    #[must_use]
    pub fn new(config: UnitConfig, info: Info) -> Self {
        let limits = Limits::new(config.max_transfer_blocks, &info);
        Self {
            config,
            info,
            limits,
            modes: ModeParameters::default(&info),
            nexuses: Nexuses::default(),
            stopped: false,
            groups: None,
            space: None,
        }
    }

    /// Sets the device's properties. Every initiator gets a unit attention for a new capacity.
    pub fn set_info(&mut self, info: Info) {
        if info.blocks != self.info.blocks {
            self.nexuses.raise(AttentionScope::All, UnitAttention::CapacityChanged);
        }
        self.limits = Limits::new(self.config.max_transfer_blocks, &info);
        self.info = info;
    }

    /// The unit uses `used_blocks`, and `available_blocks` more are available. The driver calls
    /// this periodically; when a threshold is crossed every initiator gets a unit attention, once.
    /// Only for thin units.
    pub fn set_space(&mut self, used_blocks: u64, available_blocks: u64) {
        if !self.config.thin || !self.can_unmap() {
            return;
        }
        let ModeParameters { reports_thresholds, thresholds, .. } = self.modes;
        let space =
            ThinSpace::new(used_blocks, available_blocks, &thresholds, self.info.block_size);
        let before = self.space.replace(space);
        if before.is_none() {
            // A log page, a mode page and the exponent have appeared.
            self.nexuses.raise(AttentionScope::All, UnitAttention::InquiryChanged);
        }
        let reached = space.newly_reached(before.as_ref());
        for (n, what) in [UnitAttention::SpaceLow, UnitAttention::SpaceUsed].into_iter().enumerate()
        {
            if reports_thresholds && thresholds[n].enabled && reached[n] {
                self.nexuses.raise(AttentionScope::All, what);
            }
        }
    }

    /// The thresholds have changed: the initiator that set them knows which are already reached.
    pub(crate) fn rearm_thresholds(&mut self) {
        if let Some(space) = &mut self.space {
            space.rearm(&self.modes.thresholds, self.info.block_size);
        }
    }

    /// Adds an initiator. Its first command reports a unit attention (SAM-5 6.3.1).
    ///
    /// # Errors
    /// [`TooManyNexuses`] when there are [`crate::MAX_NEXUSES`].
    pub fn add_nexus(&mut self, nexus: Nexus) -> Result<NexusId, TooManyNexuses> {
        self.nexuses.add(nexus)
    }

    /// Removes an initiator that left or was lost (SAM-5 6.3.4).
    pub fn remove_nexus(&mut self, id: NexusId) {
        self.nexuses.remove(id);
    }

    /// Number of initiators.
    #[must_use]
    pub fn nexus_count(&self) -> usize {
        self.nexuses.len()
    }

    /// The unit and its shared state were reset: it is started (SAM-5 6.3.2, 6.3.3). The transport
    /// aborts commands in flight and raises the attentions.
    pub fn reset(&mut self) {
        self.rearm_thresholds();
        self.stopped = false;
        self.nexuses.reset_copies();
    }

    /// Raises a unit attention for the initiators in `scope`.
    pub fn establish_attention(&mut self, scope: AttentionScope, what: UnitAttention) {
        self.nexuses.raise(scope, what);
    }

    /// Whether commands that one initiator aborts for another end with TASK ABORTED (TAS, SPC-4
    /// 7.5.8). If not, they end without an answer and the other gets
    /// [`UnitAttention::CommandsCleared`].
    #[must_use]
    pub fn task_aborted_status(&self) -> bool {
        self.modes.tas
    }

    /// The format of sense data (D_SENSE, SPC-4 7.5.8).
    #[must_use]
    pub fn sense_format(&self) -> SenseFormat {
        if self.modes.d_sense { SenseFormat::Descriptor } else { SenseFormat::Fixed }
    }

    pub(crate) fn can_unmap(&self) -> bool {
        self.info.unmap_granularity_blocks > 0
    }

    pub(crate) fn capabilities(&self) -> UnitCapabilities {
        UnitCapabilities {
            can_unmap: self.can_unmap(),
            has_port_groups: self.groups.is_some(),
            keeps_reservations: self.config.keeps_reservations,
            writes_atomically: self.limits.max_atomic > 0,
        }
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.config.read_only || self.info.read_only
    }

    /// Whether the write cache is enabled, as set by MODE SELECT (WCE, SBC-3 6.4.5).
    #[must_use]
    pub fn write_cache(&self) -> bool {
        self.modes.wce
    }

    pub(crate) fn set_modes(&mut self, bits: u128) {
        let modes = ModeParameters::from_bits(bits, &self.info);
        if modes != self.modes {
            self.modes = modes;
            self.rearm_thresholds();
        }
    }

    /// Whether every write must be durable when it completes (WCE).
    pub(crate) fn writes_through(&self) -> bool {
        self.info.volatile_cache && !self.modes.wce
    }
}
