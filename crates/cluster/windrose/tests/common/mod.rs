//! The real program, in its own directory, on free ports.

#![allow(dead_code, reason = "each test program uses its part")]

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_windrose");

/// Longest time a node may take to start or to stop.
const TEST_TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) fn now() -> Instant {
    #[expect(clippy::disallowed_methods, reason = "real processes live in real time")]
    Instant::now()
}

pub(crate) fn pause(ms: u64) {
    #[expect(clippy::disallowed_methods, reason = "no core is here to be blocked")]
    std::thread::sleep(Duration::from_millis(ms));
}

/// A node's directory: its configuration, its data, its log.
pub(crate) struct TestNode {
    dir: tempfile::TempDir,
    config: PathBuf,
}

impl TestNode {
    /// Creates one whose configuration ends with `more`.
    pub(crate) fn new(more: &str) -> Self {
        Self::named("test", more)
    }

    /// The same with the name `name`.
    pub(crate) fn named(name: &str, more: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("windrose.toml");
        let text = format!(
            "name = \"{name}\"\ndata_dir = \"{0}/data\"\nshutdown_timeout_s = 10\n\
             [cores]\ncount = 2\nmemory = \"32M\"\n[disks]\nbuffered = true\nlow_space_percent = 0\n\
             [iscsi]\nportals = [\"127.0.0.1:0\"]\n\
             [nvme]\nportals = [\"127.0.0.1:0\"]\ndiscovery = [\"127.0.0.1:0\"]\n\
             [api]\nsocket = \"{0}/api.sock\"\n{more}\n",
            dir.path().display()
        );
        std::fs::write(&config, text).unwrap();
        Self { dir, config }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Starts a node and waits until it serves.
    pub(crate) fn start(&self) -> Daemon {
        let mut daemon = self.spawn_node();
        let deadline = now() + TEST_TIMEOUT;
        while self.cli(&["status"]).status.code().is_none_or(|code| code == 3) {
            assert!(daemon.child.try_wait().unwrap().is_none(), "the node ended: {}", self.log());
            assert!(now() < deadline, "the node does not start: {}", self.log());
            pause(20);
        }
        while !self.log().contains("serving") {
            assert!(now() < deadline, "the node does not serve: {}", self.log());
            pause(20);
        }
        daemon
    }

    /// The configuration file.
    pub(crate) fn config(&self) -> &Path {
        &self.config
    }

    /// Runs a node that must exit by itself; returns its exit code.
    pub(crate) fn run_until_exit(&self) -> Option<i32> {
        self.spawn_node().wait()
    }

    /// Starts a node without waiting.
    pub(crate) fn spawn_node(&self) -> Daemon {
        self.spawn(false)
    }

    /// Like [`Self::spawn_node`], with the log in the journal's format.
    pub(crate) fn launch_for_journal(&self) -> Daemon {
        self.spawn(true)
    }

    /// Starts a node whose log has no reader, and waits until it answers.
    pub(crate) fn start_with_closed_stderr(&self) -> Daemon {
        let mut daemon = self.spawn_with(closed_pipe(), None);
        let deadline = now() + TEST_TIMEOUT;
        while self.cli(&["status"]).status.code().is_none_or(|code| code == 3) {
            assert!(daemon.child.try_wait().unwrap().is_none(), "the node ended");
            assert!(now() < deadline, "the node does not start");
            pause(20);
        }
        daemon
    }

    fn spawn(&self, journal: bool) -> Daemon {
        let log = File::create(self.dir.path().join("log")).unwrap();
        let found = log.metadata().unwrap();
        let stream =
            journal.then(|| ("JOURNAL_STREAM", format!("{}:{}", found.dev(), found.ino())));
        self.spawn_with(log.into(), stream)
    }

    fn spawn_with(&self, log: Stdio, stream: Option<(&str, String)>) -> Daemon {
        let child = Command::new(PROGRAM)
            .env_remove("JOURNAL_STREAM")
            .envs(stream)
            .args(["node", "--config"])
            .arg(&self.config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        Daemon { child }
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    /// Runs a command against the node.
    pub(crate) fn cli(&self, args: &[&str]) -> Output {
        cli(&format!("unix:{}/api.sock", self.path().display()), args)
    }

    /// Runs a command that must succeed; returns its output.
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let out = self.cli(args);
        let (stdout, stderr) = texts(&out);
        assert!(out.status.success(), "{args:?}: {stderr}\n{}", self.log());
        stdout
    }

    /// Runs a command with `--json`.
    pub(crate) fn json(&self, args: &[&str]) -> serde_json::Value {
        let text = self.ok(&[args, &["--json"]].concat());
        serde_json::from_str(&text).expect(&text)
    }

    /// Runs a command that must fail with `code`; returns its error output.
    pub(crate) fn fails(&self, code: i32, args: &[&str]) -> String {
        let out = self.cli(args);
        let (stdout, stderr) = texts(&out);
        assert_eq!(out.status.code(), Some(code), "{args:?}: {stdout}{stderr}");
        stderr
    }
}

/// A pipe whose other end is closed.
pub(crate) fn closed_pipe() -> Stdio {
    let (read, write) = std::io::pipe().unwrap();
    drop(read);
    write.into()
}

/// Runs a command against the API at `api`.
pub(crate) fn cli(api: &str, args: &[&str]) -> Output {
    let mut command = Command::new(PROGRAM);
    command.args(args).env("WINDROSE_API", api).stdin(Stdio::null());
    command.output().unwrap()
}

pub(crate) fn texts(out: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&out.stdout), text(&out.stderr))
}

/// A running node; killed when it is dropped.
pub(crate) struct Daemon {
    pub(crate) child: Child,
}

impl Daemon {
    /// Stops it and returns its exit code.
    pub(crate) fn stop(mut self) -> Option<i32> {
        self.signal("TERM");
        self.wait()
    }

    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &pid]).status().unwrap().success());
    }

    /// Waits until it exits by itself.
    pub(crate) fn wait(&mut self) -> Option<i32> {
        let deadline = now() + TEST_TIMEOUT;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(now() < deadline, "the node does not end");
            pause(10);
        }
    }

    /// Kills it, as a power cut would, as far as a process can tell.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
