//! The tokens of one core: each represents blocks of a volume as they were when it was created
//! (RFD 0018).

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use block::{Blocks, ChangeWatch};
use scsi::{RodToken, TOKEN_LIFETIME_S, TokenFault};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::catalog::VolumeId;
use crate::principal::{Principal, VolumeLocation};
use crate::served_volumes::{ServedVolume, ServedVolumes};

/// Most tokens of a core, and of one volume.
const MAX_TOKENS: usize = 256;
const MAX_TOKENS_PER_VOLUME: usize = 64;

/// The tokens of the volumes of one core.
#[derive(Debug, Default)]
pub(crate) struct Tokens(RefCell<Vec<Rc<TokenEntry>>>);

/// The data that a token represents.
#[derive(Debug)]
pub(crate) struct TokenEntry {
    pub(crate) token: RodToken,
    /// The volume as opened at that time: after a reopen it may be a different one.
    pub(crate) served: Weak<ServedVolume>,
    pub(crate) location: VolumeLocation,
    pub(crate) ranges: Vec<Blocks>,
    pub(crate) block_size: u32,
    /// The initiator that created it, whose access rights apply to reading it.
    pub(crate) creator: Arc<Principal>,
    pub(crate) watch: ChangeWatch,
    pub(crate) inactivity: Duration,
    pub(crate) created_at: Instant,
    pub(crate) last_used: Cell<Instant>,
    pub(crate) expiry_timer: OnceCell<AbortOnDropHandle<()>>,
}

impl TokenEntry {
    /// When it expires.
    pub(crate) fn expires_at(&self) -> Instant {
        let lifetime = Duration::from_secs(u64::from(TOKEN_LIFETIME_S));
        (self.last_used.get() + self.inactivity).min(self.created_at + lifetime)
    }
}

impl Tokens {
    /// Whether there is room for one more token of a volume, after removing invalid ones.
    pub(crate) fn has_room(&self, id: VolumeId) -> bool {
        let mut all = self.0.borrow_mut();
        let full = |all: &[Rc<TokenEntry>]| {
            let of_volume = all.iter().filter(|known| known.location.id == id).count();
            all.len() >= MAX_TOKENS || of_volume >= MAX_TOKENS_PER_VOLUME
        };
        if full(&all) {
            all.retain(|known| known.watch.is_unchanged() && known.served.strong_count() > 0);
        }
        !full(&all)
    }

    /// Adds a token.
    pub(crate) fn insert(&self, known: Rc<TokenEntry>) {
        self.0.borrow_mut().push(known);
    }

    /// Removes a token, if it is known.
    pub(crate) fn remove(&self, token: &RodToken) {
        self.0.borrow_mut().retain(|known| known.token != *token);
    }

    /// Looks up `token` if it is still valid; marks it as used.
    pub(crate) fn find(
        &self,
        served: &ServedVolumes,
        token: &RodToken,
    ) -> Result<Rc<TokenEntry>, TokenFault> {
        let all = self.0.borrow();
        let known = all.iter().find(|known| known.token == *token).ok_or(TokenFault::Unknown)?;
        let (then, now) = (known.served.upgrade(), served.get(known.location.id));
        if !then.zip(now).is_some_and(|(then, now)| Rc::ptr_eq(&then, &now)) {
            return Err(TokenFault::Unknown);
        }
        if !known.watch.is_unchanged() {
            return Err(TokenFault::Cancelled);
        }
        known.last_used.set(Instant::now());
        Ok(Rc::clone(known))
    }
}
