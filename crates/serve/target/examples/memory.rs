//! A volume in memory behind the real target: the cost of a command with a nearly free disk.
//! Benchmarks compare it with the bare echo (`crates/base/rt/examples/echo.rs`).
//!
//! ```text
//! memory [cpu=0] [window_us=0] [mib=512] [pool_mib=256] [keeps=0] [iscsi=127.0.0.1:3260] [nvme=127.0.0.1:4420]
//! ```
//! With `keeps=1` it copies nothing: written data stays in the receive buffers, as a disk reads it
//! from there by DMA. The pool must have room for the volume, several times if it is written in
//! pieces of many sizes.
//!
//! It is LUN 0 of `iqn.2026-01.io.windrose:memory` and namespace 1 of
//! `nqn.2026-01.io.windrose:memory`, for any initiator.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use block::{Dev, Epoch, Mem, MemOptions};
use rt::{Core, Cores, CoresConfig};
use target::{
    AccessList, Catalog, IscsiTarget, Limits, ServedVolume, Server, Service, Subsystem, VolumeId,
    core_links,
};
use tokio::task::spawn_local;
use volume::Volume;

/// As in the product.
#[global_allocator]
static HEAP: rt::MiMalloc = rt::MiMalloc;

const ID: VolumeId = VolumeId([7; 16]);
const BLOCK: u32 = 512;

struct Settings(HashMap<String, String>);

impl Settings {
    fn text<'a>(&'a self, name: &str, default: &'a str) -> &'a str {
        self.0.get(name).map_or(default, String::as_str)
    }

    fn number(&self, name: &str, default: u64) -> u64 {
        self.0.get(name).map_or(default, |s| s.parse().unwrap())
    }
}

fn main() {
    let words = std::env::args().skip(1);
    let pairs = words.map(|a| a.split_once('=').map(|(k, v)| (k.into(), v.into())));
    let settings = Settings(pairs.map(|pair| pair.expect("NAME=VALUE")).collect());
    let config = CoresConfig {
        cpus: vec![usize::try_from(settings.number("cpu", 0)).ok()],
        memory_bytes_per_core: usize::try_from(settings.number("pool_mib", 256) << 20).unwrap(),
        poll_window: Duration::from_micros(settings.number("window_us", 0)),
        ..CoresConfig::default()
    };
    let cores = Cores::start(&config).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        cores.handles()[0].run(|core| serve(core, settings)).await.unwrap();
        println!("serving");
        std::future::pending::<()>().await;
    });
}

async fn serve(core: Core, settings: Settings) {
    let blocks = (settings.number("mib", 512) << 20) / u64::from(BLOCK);
    let server = Server::new(core.clone(), Limits::default(), core_links(1).remove(0));
    let keeps_buffers = settings.number("keeps", 0) == 1;
    let memory = Mem::new(MemOptions { keeps_buffers, ..MemOptions::new(BLOCK, blocks) });
    let volume = Volume::new(Dev::new(memory), Epoch::default());
    let name = "memory".to_owned();
    server.add_volume(ServedVolume { id: ID, name, volume, thin: false, access: None });
    server.set_catalog(catalog());
    for (service, at) in [
        (Service::Iscsi, settings.text("iscsi", "127.0.0.1:3260")),
        (Service::Nvme, settings.text("nvme", "127.0.0.1:4420")),
    ] {
        let listener = core.listen(at.parse().unwrap()).await.unwrap();
        spawn_local(Rc::clone(&server).serve(listener, service));
    }
}

fn catalog() -> Arc<Catalog> {
    let (luns, access) = ([(0, ID)].into(), AccessList::open());
    let target = IscsiTarget { luns, access, ..IscsiTarget::default() };
    let (namespaces, access) = ([(1, ID)].into(), AccessList::open());
    let subsystem =
        Subsystem { namespaces, serial: "memory".into(), access, ..Subsystem::default() };
    Arc::new(Catalog {
        targets: [("iqn.2026-01.io.windrose:memory".to_owned(), target)].into(),
        subsystems: [("nqn.2026-01.io.windrose:memory".to_owned(), subsystem)].into(),
        ..Catalog::default()
    })
}
