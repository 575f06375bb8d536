//! Real cores, for as long as a test runs.

use std::pin::Pin;

use rt::{Core, Cores, CoresConfig};

/// The configuration of cores that may run on any processor, each with this many bytes of buffer
/// memory.
#[must_use]
pub fn cores_config(cores: usize, memory_bytes_per_core: usize) -> CoresConfig {
    CoresConfig { cpus: vec![None; cores], memory_bytes_per_core, ..CoresConfig::default() }
}

/// Waits for `future` on the calling thread.
pub fn wait<F: Future>(future: F) -> F::Output {
    let future: Pin<Box<dyn Future<Output = F::Output> + '_>> = Box::pin(future);
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// Starts cores, runs `f` on the first of them to its end, and stops them.
pub fn on_first_core<Fut: Future<Output = ()> + 'static>(
    config: &CoresConfig,
    f: impl FnOnce(Core) -> Fut + Send + 'static,
) {
    run_on_first_core(config, Box::new(|core| Box::pin(f(core))));
}

/// The body of a test.
type TestBody = Box<dyn FnOnce(Core) -> Pin<Box<dyn Future<Output = ()>>> + Send>;

/// The rest of [`on_first_core`], compiled once and not for each test.
fn run_on_first_core(config: &CoresConfig, body: TestBody) {
    let cores = Cores::start(config).unwrap();
    let result = wait(cores.handles()[0].run(body));
    cores.stop_now();
    result.expect("the test's core panicked, see above");
}
