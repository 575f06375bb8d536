//! Any text as a configuration: an error with a message, or a configuration within its bounds.

use std::path::Path;

use config::Config;

pub(crate) fn run(bytes: &[u8]) {
    crate::feed(bytes, |text: &str| match Config::parse(Path::new("fuzz.toml"), text) {
        Err(e) => {
            assert!(!e.message.is_empty() && !e.message.contains('\n'));
            assert!(e.line.is_none_or(|line| line <= text.lines().count() + 1));
        }
        Ok(config) => {
            assert!(config.data_dir.is_absolute() && config.api.socket.is_absolute());
            assert!(config.limits.logins <= config.limits.connections);
            assert!(config.cores.count.is_none() || config.cores.cpus.is_empty());
            assert!(config.cores.memory_bytes >= 16 << 20);
        }
    });
}
