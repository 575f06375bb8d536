//! Servers on real cores.

pub(crate) mod client;

use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;

use rt::net::Listener;
use rt::{Core, Cores, CoresConfig};
use target::{Server, Service};
use tokio::task::spawn_local;

/// Buffer memory of a core in bytes.
pub(crate) const POOL: usize = 8 << 20;

pub(crate) fn on_core<Fut: Future<Output = ()> + 'static>(
    f: impl FnOnce(Core) -> Fut + Send + 'static,
) {
    on_cores(1, f);
}

/// Runs `f` on the first of `cores` cores.
pub(crate) fn on_cores<Fut: Future<Output = ()> + 'static>(
    cores: usize,
    f: impl FnOnce(Core) -> Fut + Send + 'static,
) {
    let cpus = vec![None; cores];
    let config = CoresConfig { cpus, memory_bytes_per_core: POOL, ..CoresConfig::default() };
    let cores = Cores::start(&config).unwrap();
    let wait = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let result = wait.block_on(cores.handles()[0].run(f));
    cores.stop_now();
    result.expect("the test's core panicked, see above");
}

/// Has the server serve on a port of its own.
pub(crate) async fn listen(core: &Core, server: &Rc<Server>, service: Service) -> SocketAddr {
    let listener: Listener = core.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.local_addr().unwrap();
    spawn_local(Rc::clone(server).serve(listener, service));
    address
}
