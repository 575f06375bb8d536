//! `windrose node`: runs a node in this process.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use config::Config;
use node::node::{Node, StoppedNode};
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cli::NodeArgs;
use crate::exit::{CliError, FAILED, NEEDS_RESTORE, USAGE};
use crate::log;
use crate::remote::print_line;

/// Loads the configuration from `path`, or from the default path.
pub(crate) fn load_config(path: Option<&Path>) -> Result<Config, CliError> {
    let config = match path {
        Some(path) => Config::load(path),
        None => Config::load_default(),
    };
    config.map_err(|e| CliError::new(USAGE, e.to_string()))
}

/// Runs a node until it is told to stop.
pub(crate) fn run(args: &NodeArgs) -> Result<ExitCode, CliError> {
    let config = load_config(args.config.as_deref())?;
    let fault = rt::fault_point::arm().map_err(|e| CliError::new(USAGE, e.to_string()))?;
    if args.check {
        Node::check(&config).map_err(|e| CliError::new(USAGE, e.to_string()))?;
        return print_line("The configuration is valid.").map(|()| ExitCode::SUCCESS);
    }
    log::init_logging(&config);
    if let Some(fault) = fault {
        tracing::warn!(%fault, "this process ends by itself, as by kill -9");
    }
    crash_on_panic();
    engine::limits::raise_process_limits(&config);
    // For the control plane only: blocking store calls run on these threads, and each keeps some
    // memory.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(8).build();
    let runtime = runtime.map_err(|e| CliError::new(FAILED, e.to_string()))?;
    runtime.block_on(run_until_stopped(&config))
}

/// Why a run of the node ended.
enum NodeExit {
    Stop(&'static str),
    Restart,
}

/// Runs the node, and restarts it in this process when its cluster membership changes.
async fn run_until_stopped(config: &Config) -> Result<ExitCode, CliError> {
    let mut signals = Signals::new()?;
    loop {
        notify_systemd(&[NotifyState::Status("Opening volumes")]);
        let node = tokio::select! {
            started = Node::start(config) => started.map_err(|e| {
                tracing::error!(error = %e, "node did not start");
                if e.is_permanent() {
                    // The service manager does not restart it, and shows this.
                    notify_systemd(&[NotifyState::Status(e.to_string().lines().next().unwrap_or_default())]);
                    return CliError::new(NEEDS_RESTORE, e.to_string());
                }
                CliError::new(FAILED, e.to_string())
            })?,
            name = signals.next() => {
                tracing::info!(signal = name, "stopped while starting");
                return Ok(ExitCode::SUCCESS);
            }
        };
        notify_systemd(&[NotifyState::Ready, NotifyState::Status("Serving")]);
        let exit = tokio::select! {
            name = signals.next() => NodeExit::Stop(name),
            () = node.wait_restart_request() => NodeExit::Restart,
            (other, own) = node.wait_replaced() => {
                tracing::error!(own, other, "another process now runs as this node; exiting at once");
                // No orderly stop: a stop would write state that now belongs to the other process.
                std::process::exit(FAILED.into());
            }
            () = feed_watchdog(&node) => unreachable!("the watchdog is kept for ever"),
        };
        match exit {
            NodeExit::Stop(name) => {
                tracing::info!(signal = name, "stopping; a second signal ends the process at once");
                notify_systemd(&[NotifyState::Stopping, NotifyState::Status("Stopping")]);
                return Ok(exit_code(&stop_node(node, &mut signals).await));
            }
            NodeExit::Restart => {
                tracing::info!("restarting");
                notify_systemd(&[NotifyState::Status("Restarting")]);
                let stopped = stop_node(node, &mut signals).await;
                if !stopped.clean {
                    return Ok(exit_code(&stopped));
                }
            }
        }
    }
}

/// Stops a node; a signal in the meantime ends the process.
async fn stop_node(node: Node, signals: &mut Signals) -> StoppedNode {
    tokio::select! {
        stopped = node.stop() => stopped,
        name = signals.next() => {
            tracing::warn!(signal = name, "stopped before everything was closed");
            std::process::exit(FAILED.into());
        }
    }
}

fn exit_code(stopped: &StoppedNode) -> ExitCode {
    if stopped.clean {
        tracing::info!("stopped; every volume is durable and closed");
        return ExitCode::SUCCESS;
    }
    tracing::error!("shutdown timed out, or a volume did not close; see above");
    // Returning would wait for threads that hang.
    std::process::exit(FAILED.into());
}

/// Notifies systemd, if it runs this process.
pub(crate) fn notify_systemd(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

/// Feeds systemd's watchdog, if enabled, while every core answers.
async fn feed_watchdog(node: &Node) {
    let Some(limit) = sd_notify::watchdog_enabled() else {
        return std::future::pending().await;
    };
    let pause = (limit / 3).max(Duration::from_millis(100));
    loop {
        if node.is_alive().await {
            notify_systemd(&[NotifyState::Watchdog]);
        } else {
            tracing::error!("a core does not respond");
        }
        tokio::time::sleep(pause).await;
    }
}

/// Signals that stop the process in an orderly way.
pub(crate) struct Signals {
    term: Signal,
    int: Signal,
}

impl Signals {
    pub(crate) fn new() -> Result<Self, CliError> {
        let listen = |kind| signal(kind).map_err(|e| CliError::new(FAILED, e.to_string()));
        Ok(Self { term: listen(SignalKind::terminate())?, int: listen(SignalKind::interrupt())? })
    }

    pub(crate) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.term.recv() => "SIGTERM",
            _ = self.int.recv() => "SIGINT",
        }
    }
}

/// Aborts the process on a panic: a node with a bug cannot be trusted to continue, and everything
/// acknowledged as durable is on disk. In debug builds a panic ends only its task, so that tests
/// see it.
pub(crate) fn crash_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        if cluster::store::embedded::is_catching_panics() {
            tracing::debug!(%panic, "panic in the store's library; the store reports it");
            return;
        }
        let trace = std::backtrace::Backtrace::force_capture();
        tracing::error!(thread = thread.name(), %panic, %trace, "panic: this is a bug");
        if !cfg!(debug_assertions) {
            std::process::abort();
        }
    }));
}
