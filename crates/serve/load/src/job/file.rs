//! fio's job files: INI files with sections; later sections start with the keys of `[global]`.

use super::{Job, KeyError};

/// Maximum length of a file in bytes, and maximum number of sections.
const MAX_LEN: usize = 1 << 20;
const MAX_SECTIONS: usize = 1024;

/// Why a job file cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobFileError {
    /// A key, or its value.
    #[error("line {line}: {why}")]
    Key {
        /// Which line, from 1.
        line: usize,
        /// What is wrong with it.
        why: KeyError,
    },
    /// A line that is neither a section nor a key.
    #[error("line {line}: {why}")]
    Line {
        /// Which line, from 1.
        line: usize,
        /// What is wrong with it.
        why: &'static str,
    },
    /// No job in the file.
    #[error("there is no job: add a section besides [global]")]
    Empty,
    /// It is too long.
    #[error("a job file has at most {MAX_LEN} bytes and {MAX_SECTIONS} sections")]
    TooLong,
}

/// Parses a job file: one [`Job`] for each section, in order.
///
/// Comments begin with `#` or `;` anywhere in a line, as in fio.
///
/// # Errors
/// [`JobFileError`] names the first line that is invalid.
pub fn parse(text: &str) -> Result<Vec<Job>, JobFileError> {
    if text.len() > MAX_LEN {
        return Err(JobFileError::TooLong);
    }
    let (mut global, mut jobs) = (Job::default(), Vec::<Job>::new());
    let mut in_global = None;
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split(['#', ';']).next().unwrap_or("").trim();
        if line.is_empty() {
            continue;
        }
        if let Some(name) = section(number, line)? {
            in_global = Some(name == "global");
            if name != "global" {
                if jobs.len() == MAX_SECTIONS {
                    return Err(JobFileError::TooLong);
                }
                jobs.push(Job { name: name.to_owned(), ..global.clone() });
            }
            continue;
        }
        let job = match (in_global, jobs.last_mut()) {
            (Some(true), _) => &mut global,
            (Some(false), Some(job)) => job,
            _ => {
                return Err(JobFileError::Line {
                    line: number,
                    why: "a line before the first section",
                });
            }
        };
        set_from_line(job, number, line)?;
    }
    if jobs.is_empty() { Err(JobFileError::Empty) } else { Ok(jobs) }
}

fn section(line: usize, text: &str) -> Result<Option<&str>, JobFileError> {
    let Some(rest) = text.strip_prefix('[') else { return Ok(None) };
    match rest.strip_suffix(']').map(str::trim) {
        Some(name) if !name.is_empty() => Ok(Some(name)),
        Some(_) => Err(JobFileError::Line { line, why: "the section has no name" }),
        None => Err(JobFileError::Line { line, why: "the section lacks its closing ]" }),
    }
}

fn set_from_line(job: &mut Job, line: usize, text: &str) -> Result<(), JobFileError> {
    if text.starts_with("include ") {
        return Err(JobFileError::Line { line, why: "include is not supported" });
    }
    if text.contains("${") {
        return Err(JobFileError::Line { line, why: "variables (${NAME}) are not supported" });
    }
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name.trim(), Some(value)),
        None => (text, None),
    };
    job.set(name, value).map_err(|why| JobFileError::Key { line, why })
}
