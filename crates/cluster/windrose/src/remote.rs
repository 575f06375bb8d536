//! Commands that talk to a node.

use std::future::Future;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use api::client::Client;
use serde::Serialize;

use crate::cli::{self, ConfirmArgs};
use crate::exit::{CliError, FAILED, USAGE};
use crate::files;

/// The node that a command talks to, and how to print its answers.
pub(crate) struct NodeConnection {
    pub(crate) client: Client,
    json: bool,
}

/// Runs a command that talks to a node.
pub(crate) fn run<F, Fut>(args: &cli::ConnectionArgs, command: F) -> Result<ExitCode, CliError>
where
    F: FnOnce(NodeConnection) -> Fut,
    Fut: Future<Output = Result<ExitCode, CliError>>,
{
    let token = args.token_file.as_deref().map(files::read_line).transpose()?;
    let client = Client::new(args.api.clone()).with_token(token).with_ca_file(args.ca_cert.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| CliError::new(FAILED, e.to_string()))?;
    runtime.block_on(command(NodeConnection { client, json: args.json }))
}

impl NodeConnection {
    /// Prints an answer: as JSON for programs, otherwise as `to_text` formats it.
    pub(crate) fn print<T: Serialize>(
        &self,
        answer: &T,
        to_text: impl FnOnce(&T) -> String,
    ) -> Result<(), CliError> {
        let output = if self.json {
            serde_json::to_string_pretty(answer)
                .map_err(|e| CliError::new(FAILED, e.to_string()))?
        } else {
            to_text(answer)
        };
        print_line(output.trim_end())
    }
}

/// Requires confirmation of a command that cannot be undone: by the flags, or by typing the name.
pub(crate) fn require_confirmation(
    args: &ConfirmArgs,
    (kind, name): (&str, &str),
    what: &str,
    done: &str,
    hint: &str,
) -> Result<(), CliError> {
    match &args.confirm {
        _ if args.yes => Ok(()),
        None => prompt_for_name((kind, name), what, done, hint),
        Some(confirm) if confirm == name => Ok(()),
        Some(confirm) => {
            let message = format!("{kind} {name} was not {done}: the confirmation names {confirm}");
            Err(CliError::new(USAGE, message)
                .with_hint(format!("use --confirm {name}, if that is the one")))
        }
    }
}

/// Makes the user type the name of the object (its kind, its name) that is to be `done` something
/// to.
pub(crate) fn prompt_for_name(
    (kind, name): (&str, &str),
    what: &str,
    done: &str,
    hint: &str,
) -> Result<(), CliError> {
    if !std::io::stdin().is_terminal() {
        let message =
            format!("{kind} {name} was not {done}: there is no terminal for a confirmation");
        return Err(CliError::new(USAGE, message).with_hint(hint));
    }
    let mut line = String::new();
    let prompted = write!(std::io::stderr(), "{what}\nType its name to continue: ");
    let read = prompted.and_then(|()| std::io::stdin().read_line(&mut line));
    read.map_err(|e| CliError::new(FAILED, format!("standard input: {e}")))?;
    if line.trim() == name {
        Ok(())
    } else {
        Err(CliError::new(FAILED, format!("{kind} {name} was not {done}: the name did not match")))
    }
}

/// Prints lines on standard output.
pub(crate) fn print_line(text: &str) -> Result<(), CliError> {
    print_bytes(format!("{text}\n").as_bytes())
}

/// Writes to standard output. A reader that closes it early (`| head`) is no error.
pub(crate) fn print_bytes(bytes: &[u8]) -> Result<(), CliError> {
    use std::io::ErrorKind;
    let mut out = std::io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(CliError::new(FAILED, format!("standard output: {e}")))
        }
        _ => Ok(()),
    }
}
