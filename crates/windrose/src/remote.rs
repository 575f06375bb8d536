//! Talking to a node.

use std::future::Future;
use std::process::ExitCode;

use api::client::Client;
use serde::Serialize;

use crate::cli;
use crate::exit::{FAILED, Failure};
use crate::files;

/// The node that a command talks to, and how its answer is to be shown.
pub(crate) struct Remote {
    pub(crate) client: Client,
    json: bool,
}

/// Runs a command that talks to a node.
pub(crate) fn run<F, Fut>(args: &cli::Remote, command: F) -> Result<ExitCode, Failure>
where
    F: FnOnce(Remote) -> Fut,
    Fut: Future<Output = Result<ExitCode, Failure>>,
{
    let token = args.token_file.as_deref().map(files::line).transpose()?;
    let client = Client::new(args.api.clone()).with_token(token).with_roots(args.ca_cert.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Failure::new(FAILED, e.to_string()))?;
    runtime.block_on(command(Remote { client, json: args.json }))
}

impl Remote {
    /// Prints an answer: as JSON for programs, else as `people` writes it.
    pub(crate) fn print<T: Serialize>(
        &self,
        answer: &T,
        people: impl FnOnce(&T) -> String,
    ) -> Result<(), Failure> {
        let text = if self.json {
            serde_json::to_string_pretty(answer).map_err(|e| Failure::new(FAILED, e.to_string()))?
        } else {
            people(answer)
        };
        write(text.trim_end())
    }
}

/// Writes to standard output. Whoever closes it early (`| head`) has seen enough.
pub(crate) fn write(text: &str) -> Result<(), Failure> {
    use std::io::{ErrorKind, Write};
    match writeln!(std::io::stdout(), "{text}") {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::new(FAILED, format!("standard output: {e}")))
        }
        _ => Ok(()),
    }
}
