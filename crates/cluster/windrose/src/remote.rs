//! Talking to a node.

use std::future::Future;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use api::client::Client;
use serde::Serialize;

use crate::cli::{self, ConfirmArgs};
use crate::exit::{FAILED, Failure, USAGE};
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

/// Makes sure that somebody means what cannot be undone: by the flags, or by typing the name.
pub(crate) fn confirmed(
    args: &ConfirmArgs,
    (kind, name): (&str, &str),
    what: &str,
    done: &str,
    hint: &str,
) -> Result<(), Failure> {
    match &args.confirm {
        _ if args.yes => Ok(()),
        None => ask_for_name((kind, name), what, done, hint),
        Some(confirm) if confirm == name => Ok(()),
        Some(confirm) => {
            let message = format!("{kind} {name} is not {done}: {confirm} is confirmed");
            Err(Failure::new(USAGE, message).hint(format!("--confirm {name}, if that is meant")))
        }
    }
}

/// Has somebody type the name of the volume or pool (its kind, its name) that is to be `done` something to.
pub(crate) fn ask_for_name(
    (kind, name): (&str, &str),
    what: &str,
    done: &str,
    hint: &str,
) -> Result<(), Failure> {
    if !std::io::stdin().is_terminal() {
        let message = format!("{kind} {name} is not {done}: nobody is there to confirm");
        return Err(Failure::new(USAGE, message).hint(hint));
    }
    let mut line = String::new();
    let asked = write!(std::io::stderr(), "{what}\nType its name to go on: ");
    let read = asked.and_then(|()| std::io::stdin().read_line(&mut line));
    read.map_err(|e| Failure::new(FAILED, format!("standard input: {e}")))?;
    if line.trim() == name {
        Ok(())
    } else {
        Err(Failure::new(FAILED, format!("{kind} {name} is not {done}: that was not its name")))
    }
}

/// Writes a text to standard output, as lines.
pub(crate) fn write(text: &str) -> Result<(), Failure> {
    write_all(format!("{text}\n").as_bytes())
}

/// Writes a text to standard error. Nobody is told if nobody reads that.
pub(crate) fn tell(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Writes to standard output. Whoever closes it early (`| head`) has seen enough.
pub(crate) fn write_all(bytes: &[u8]) -> Result<(), Failure> {
    use std::io::ErrorKind;
    let mut out = std::io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::new(FAILED, format!("standard output: {e}")))
        }
        _ => Ok(()),
    }
}
