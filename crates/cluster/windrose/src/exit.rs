//! Exit codes and errors of commands.

use std::io::Write;
use std::process::ExitCode;

use api::ErrorCode;
use api::client::{ApiAddress, CallError};

/// The node refused or failed.
pub(crate) const FAILED: u8 = 1;
/// The command line is invalid.
pub(crate) const USAGE: u8 = 2;
/// No node answers.
pub(crate) const UNREACHABLE: u8 = 3;
/// No such volume.
pub(crate) const NOT_FOUND: u8 = 4;
/// Data is unavailable. (5 means at risk: [`api::Verdict::exit_code`].)
pub(crate) const UNAVAILABLE: u8 = 6;

/// The node's own records are missing or damaged, and must be restored.
pub(crate) const NEEDS_RESTORE: u8 = 7;

/// Why a command failed.
#[derive(Debug)]
pub(crate) struct CliError {
    code: u8,
    message: String,
    hint: Option<String>,
}

impl CliError {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), hint: None }
    }

    pub(crate) fn with_hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// Prints it on standard error and returns the exit code.
    pub(crate) fn report(self) -> ExitCode {
        print_error_line(&format!("windrose: {}", self.message));
        if let Some(hint) = self.hint {
            print_error_line(&format!("          {hint}"));
        }
        ExitCode::from(self.code)
    }
}

/// Prints lines on standard error, ignoring write errors.
pub(crate) fn print_error_line(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

impl From<CallError> for CliError {
    fn from(e: CallError) -> Self {
        let message = e.to_string();
        match e {
            CallError::Refused(error) => {
                let code = if error.code == ErrorCode::NotFound { NOT_FOUND } else { FAILED };
                Self { code, message, hint: error.hint }
            }
            CallError::Unreachable { address, .. } => {
                Self { code: UNREACHABLE, message, hint: Some(connection_hint(&address)) }
            }
            CallError::MalformedResponse { .. } => Self::new(FAILED, message).with_hint(
                "check the address: it may be another program, or a node of another version",
            ),
        }
    }
}

fn connection_hint(address: &ApiAddress) -> String {
    match address {
        ApiAddress::Unix(_) => {
            "check that the node runs (`systemctl status windrose`) and that you may use its \
             socket; --api selects another one"
                .to_owned()
        }
        ApiAddress::Tls { .. } => "check that the node runs with api.tcp set; --ca-cert sets the \
            certificates to trust"
            .to_owned(),
    }
}
