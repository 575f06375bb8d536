//! Real cores, for as long as a test runs.

use rt::{Core, Cores, CoresConfig};

/// The configuration of cores that may run on any processor, each with this many bytes of buffer
/// memory.
#[must_use]
pub fn cores_config(cores: usize, memory_bytes_per_core: usize) -> CoresConfig {
    CoresConfig { cpus: vec![None; cores], memory_bytes_per_core, ..CoresConfig::default() }
}

/// Waits for `future` on the calling thread.
pub fn wait<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// Starts cores, runs `f` on the first of them to its end, and stops them.
pub fn on_first_core<Fut: Future<Output = ()> + 'static>(
    config: &CoresConfig,
    f: impl FnOnce(Core) -> Fut + Send + 'static,
) {
    let cores = Cores::start(config).unwrap();
    let result = wait(cores.handles()[0].run(f));
    cores.stop_now();
    result.expect("the test's core panicked, see above");
}
