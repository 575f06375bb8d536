//! `windrose node`: the process around a node.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use node::config::Config;
use node::node::{Node, Stopped};
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cli::NodeArgs;
use crate::exit::{FAILED, Failure, RESTORE, USAGE};
use crate::log;
use crate::remote::write;

/// The configuration in a file, or where it is by default.
pub(crate) fn load(path: Option<&Path>) -> Result<Config, Failure> {
    let config = match path {
        Some(path) => Config::load(path),
        None => Config::load_default(),
    };
    config.map_err(|e| Failure::new(USAGE, e.to_string()))
}

/// Runs a node until it is told to stop.
pub(crate) fn run(args: &NodeArgs) -> Result<ExitCode, Failure> {
    let config = load(args.config.as_deref())?;
    let fault = rt::fault::arm().map_err(|e| Failure::new(USAGE, e.to_string()))?;
    if args.check {
        Node::check(&config).map_err(|e| Failure::new(USAGE, e.to_string()))?;
        return write("The configuration is right.").map(|()| ExitCode::SUCCESS);
    }
    log::start(&config);
    if let Some(fault) = fault {
        tracing::warn!(%fault, "this process ends by itself, as by kill -9");
    }
    crash_on_panic();
    node::limits::raise(&config);
    // The control plane's own: the store is read and written on these, and each thread keeps some memory.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(8).build();
    let runtime = runtime.map_err(|e| Failure::new(FAILED, e.to_string()))?;
    runtime.block_on(live(&config))
}

/// What ends a life of a node.
enum Told {
    Stop(&'static str),
    BeginAgain,
}

/// One life after the other: a node that becomes another one in a cluster begins again.
async fn live(config: &Config) -> Result<ExitCode, Failure> {
    let mut signals = Signals::new()?;
    loop {
        notify(&[NotifyState::Status("Opening volumes")]);
        let node = tokio::select! {
            started = Node::start(config) => started.map_err(|e| {
                tracing::error!(error = %e, "the node did not start");
                if e.is_lasting() {
                    // The service manager does not try again, and shows this.
                    notify(&[NotifyState::Status(e.to_string().lines().next().unwrap_or_default())]);
                    return Failure::new(RESTORE, e.to_string());
                }
                Failure::new(FAILED, e.to_string())
            })?,
            name = signals.next() => {
                tracing::info!(signal = name, "told to stop while starting");
                return Ok(ExitCode::SUCCESS);
            }
        };
        notify(&[NotifyState::Ready, NotifyState::Status("Serving")]);
        let told = tokio::select! {
            name = signals.next() => Told::Stop(name),
            () = node.wants_restart() => Told::BeginAgain,
            (other, own) = node.replaced() => {
                tracing::error!(own, other, "another process is this node now: this one ends at once");
                // Not in order: what it would leave is the other one's.
                std::process::exit(FAILED.into());
            }
            () = keep_watchdog(&node) => unreachable!("the watchdog is kept for ever"),
        };
        match told {
            Told::Stop(name) => {
                tracing::info!(signal = name, "stopping; a second signal ends the process at once");
                notify(&[NotifyState::Stopping, NotifyState::Status("Stopping")]);
                return Ok(end(&stop(node, &mut signals).await));
            }
            Told::BeginAgain => {
                tracing::info!("beginning again");
                notify(&[NotifyState::Status("Beginning again")]);
                let stopped = stop(node, &mut signals).await;
                if !stopped.clean {
                    return Ok(end(&stopped));
                }
            }
        }
    }
}

/// Stops a node; a signal meanwhile ends the process.
async fn stop(node: Node, signals: &mut Signals) -> Stopped {
    tokio::select! {
        stopped = node.stop() => stopped,
        name = signals.next() => {
            tracing::warn!(signal = name, "ended before everything was closed");
            std::process::exit(FAILED.into());
        }
    }
}

fn end(stopped: &Stopped) -> ExitCode {
    if stopped.clean {
        tracing::info!("stopped; every volume is durable and closed");
        return ExitCode::SUCCESS;
    }
    tracing::error!("ran out of time while stopping, or a volume did not close; see above");
    // Not by return: threads that hang would be waited for.
    std::process::exit(FAILED.into());
}

/// Tells the service manager, where there is one.
pub(crate) fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "the service manager cannot be told");
    }
}

/// Tells the service manager's watchdog, where there is one, that every core answers.
async fn keep_watchdog(node: &Node) {
    let Some(limit) = sd_notify::watchdog_enabled() else {
        return std::future::pending().await;
    };
    let pause = (limit / 3).max(Duration::from_millis(100));
    loop {
        if node.is_alive().await {
            notify(&[NotifyState::Watchdog]);
        } else {
            tracing::error!("a core does not answer");
        }
        tokio::time::sleep(pause).await;
    }
}

/// Signals that end the process in an orderly way.
pub(crate) struct Signals {
    term: Signal,
    int: Signal,
}

impl Signals {
    pub(crate) fn new() -> Result<Self, Failure> {
        let listen = |kind| signal(kind).map_err(|e| Failure::new(FAILED, e.to_string()));
        Ok(Self { term: listen(SignalKind::terminate())?, int: listen(SignalKind::interrupt())? })
    }

    pub(crate) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.term.recv() => "SIGTERM",
            _ = self.int.recv() => "SIGINT",
        }
    }
}

/// A node that has gone wrong stops at once: what it was about to do next cannot be trusted, and
/// everything that was acknowledged as durable is. In debug builds a panic ends one task, so that
/// tests see it.
pub(crate) fn crash_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        if node::meta::embedded::is_contained() {
            tracing::debug!(%panic, "the library of the store has given up; the store says so");
            return;
        }
        let trace = std::backtrace::Backtrace::force_capture();
        tracing::error!(thread = thread.name(), %panic, %trace, "the program is wrong");
        if !cfg!(debug_assertions) {
            std::process::abort();
        }
    }));
}
