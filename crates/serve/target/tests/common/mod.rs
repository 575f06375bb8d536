//! Servers on real cores.

pub(crate) mod client;

use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;

use rt::Core;
use rt::net::Listener;
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
    testkit::on_first_core(&testkit::cores_config(cores, POOL), f);
}

/// Has the server serve on a port of its own.
pub(crate) async fn listen(core: &Core, server: &Rc<Server>, service: Service) -> SocketAddr {
    let listener: Listener = core.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.local_addr().unwrap();
    spawn_local(Rc::clone(server).serve(listener, service));
    address
}
