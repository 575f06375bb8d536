//! The volumes of one core as front ends see them, and the catalog that says whom they are served
//! to.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use block::{Access, AccessState};
use tokio_util::task::AbortOnDropHandle;
use volume::Volume;

use crate::catalog::{Catalog, VolumeId};

/// A volume as front ends see it.
#[derive(Debug)]
pub struct ServedVolume {
    /// Its identity.
    pub id: VolumeId,
    /// Its name, unique in the node.
    pub name: String,
    /// The volume itself.
    pub volume: Rc<Volume>,
    /// Whether space is allocated only as it is written.
    pub thin: bool,
    /// Its access state on this node, if other nodes serve it too: then it is also in
    /// [`Catalog::shared`]. The engine may set it at any time; initiators are told.
    pub access: Option<AccessState>,
}

impl ServedVolume {
    /// The access to it through this node; `None` if only this node serves it.
    pub(crate) fn access_state(&self, catalog: &Catalog) -> Option<Access> {
        let access = self.access.as_ref().filter(|_| catalog.shared.contains_key(&self.id))?;
        Some(access.get())
    }
}

/// Space that a thin volume uses and that is available to it, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeSpace {
    /// Space used.
    pub used: u64,
    /// Space available on its backing store, which other volumes may use as well.
    pub available: u64,
}

/// The volumes of a core, and the current catalog.
#[derive(Default)]
pub(crate) struct ServedVolumes {
    catalog: RefCell<Arc<Catalog>>,
    by_id: RefCell<BTreeMap<VolumeId, VolumeEntry>>,
}

/// A volume of this core, and the task that reports its access state to initiators.
struct VolumeEntry {
    served: Rc<ServedVolume>,
    space: Cell<Option<VolumeSpace>>,
    _watch: Option<AbortOnDropHandle<()>>,
}

impl ServedVolumes {
    /// The current catalog.
    pub(crate) fn catalog(&self) -> Arc<Catalog> {
        Arc::clone(&self.catalog.borrow())
    }

    /// Replaces the catalog.
    pub(crate) fn set_catalog(&self, catalog: Arc<Catalog>) {
        self.catalog.replace(catalog);
    }

    /// Adds a volume, with the task that reports its access state to initiators, if it has one.
    pub(crate) fn insert(&self, served: ServedVolume, watch: Option<AbortOnDropHandle<()>>) {
        let (id, served, space) = (served.id, Rc::new(served), Cell::default());
        self.by_id.borrow_mut().insert(id, VolumeEntry { served, space, _watch: watch });
    }

    /// Removes a volume.
    pub(crate) fn remove(&self, id: VolumeId) -> Option<Rc<ServedVolume>> {
        self.by_id.borrow_mut().remove(&id).map(|kept| kept.served)
    }

    /// The volume, if it belongs to this core.
    pub(crate) fn get(&self, id: VolumeId) -> Option<Rc<ServedVolume>> {
        self.by_id.borrow().get(&id).map(|kept| Rc::clone(&kept.served))
    }

    /// All volumes.
    pub(crate) fn all(&self) -> Vec<Rc<ServedVolume>> {
        self.by_id.borrow().values().map(|kept| Rc::clone(&kept.served)).collect()
    }

    /// The last known space of a volume.
    pub(crate) fn space(&self, id: VolumeId) -> Option<VolumeSpace> {
        self.by_id.borrow().get(&id)?.space.get()
    }

    /// Sets the space of a volume; returns whether it has changed.
    pub(crate) fn set_space(&self, id: VolumeId, space: VolumeSpace) -> bool {
        let volumes = self.by_id.borrow();
        volumes.get(&id).is_some_and(|kept| kept.space.replace(Some(space)) != Some(space))
    }
}
