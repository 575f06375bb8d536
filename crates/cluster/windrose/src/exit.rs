//! How a command ends.

use std::process::ExitCode;

use api::Code;
use api::client::{Address, CallError};

use crate::remote::tell;

/// The node refused or failed.
pub(crate) const FAILED: u8 = 1;
/// What was asked for makes no sense.
pub(crate) const USAGE: u8 = 2;
/// No node answers.
pub(crate) const UNREACHABLE: u8 = 3;
/// There is no such volume.
pub(crate) const NOT_FOUND: u8 = 4;
/// Data cannot be reached. (5 is that it is at risk: [`api::Verdict::exit_code`].)
pub(crate) const UNAVAILABLE: u8 = 6;

/// What the node knows of itself is missing or damaged: it has to be restored.
pub(crate) const RESTORE: u8 = 7;

/// A command that did not do what it was asked for.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    message: String,
    hint: Option<String>,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), hint: None }
    }

    pub(crate) fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// Tells it on standard error and gives the exit code.
    pub(crate) fn report(self) -> ExitCode {
        tell(&format!("windrose: {}", self.message));
        if let Some(hint) = self.hint {
            tell(&format!("          {hint}"));
        }
        ExitCode::from(self.code)
    }
}

impl From<CallError> for Failure {
    fn from(e: CallError) -> Self {
        let message = e.to_string();
        match e {
            CallError::Refused(error) => {
                let code = if error.code == Code::NotFound { NOT_FOUND } else { FAILED };
                Self { code, message, hint: error.hint }
            }
            CallError::Unreachable { address, .. } => {
                Self { code: UNREACHABLE, message, hint: Some(how_to_reach(&address)) }
            }
            CallError::Protocol { .. } => Self::new(FAILED, message)
                .hint("is it another program, or a node of another version?"),
        }
    }
}

fn how_to_reach(address: &Address) -> String {
    match address {
        Address::Unix(_) => {
            "is the node running (`systemctl status windrose`), and may you use its \
                             socket? --api names another one"
                .to_owned()
        }
        Address::Tls { .. } => "is the node running, with api.tcp set? --ca-cert names the \
                                certificates to trust"
            .to_owned(),
    }
}
