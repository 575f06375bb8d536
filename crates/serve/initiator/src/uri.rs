//! URIs of remote volumes, and paths of local ones.
//!
//! ```text
//! nvme://HOST[:4420]/SUBNQN[?nsid=1&hostnqn=NQN]
//! iscsi://[USER[%SECRET]@]HOST[:3260]/IQN/LUN          as libiscsi has it
//! nbd://HOST[:10809]/[EXPORT]                          as the NBD project has it (doc/uri.md)
//! nbd+unix:///[EXPORT]?socket=PATH
//! anything else                                        a path
//! ```
//!
//! HOST is a name, an IPv4 address or an IPv6 address in brackets. Parsing never panics and looks
//! nothing up; connecting reveals what does not exist. nothing up: what does not exist is found out
//! by who connects.

use std::fmt;
use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::str::FromStr;

/// Longest accepted URI, in bytes.
const MAX_LEN: usize = 4096;
/// Longest name of an NVMe subsystem or host (NVMe Base 2.0, 4.5).
const MAX_NQN: usize = 223;
/// Longest name of an iSCSI node (RFC 7143, 4.2.7.1).
const MAX_IQN: usize = 223;
/// Longest name of an NBD export (proto.md, "Values").
const MAX_EXPORT: usize = 4096;

/// A parsed name. See the [module](self).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A namespace of an NVMe/TCP controller.
    Nvme(NvmeUri),
    /// A logical unit of an iSCSI target.
    Iscsi(IscsiUri),
    /// An export of an NBD server.
    Nbd(NbdUri),
    /// A file or block device of this machine.
    Path(PathBuf),
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authority {
    /// A name or an address; an IPv6 address without its brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

/// A namespace of an NVMe/TCP controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmeUri {
    /// Where the controller listens; port 4420 if none is given.
    pub authority: Authority,
    /// Name of the subsystem.
    pub subnqn: String,
    /// Namespace identifier; 1 if none is given.
    pub nsid: u32,
    /// NQN of the host; this machine's if none is given.
    pub hostnqn: Option<String>,
}

/// A logical unit of an iSCSI target.
#[derive(Clone, PartialEq, Eq)]
pub struct IscsiUri {
    /// Where the portal listens; port 3260 if none is given.
    pub authority: Authority,
    /// CHAP user and secret; the secret may be configured elsewhere.
    pub user: Option<(String, Option<String>)>,
    /// Name of the target.
    pub iqn: String,
    /// Number of the logical unit.
    pub lun: u16,
}

/// An export of an NBD server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUri {
    /// Where the server listens.
    pub address: NbdAddress,
    /// Name of the export; the empty one is the server's default.
    pub export: String,
}

/// Where an NBD server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdAddress {
    /// Over TCP; port 10809 if none is given.
    Tcp(Authority),
    /// On a Unix socket.
    Unix(PathBuf),
}

/// Why a text is no target name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UriError {
    /// Empty or too long.
    #[error("a target is named by 1 to {MAX_LEN} bytes")]
    Length,
    /// Unknown scheme.
    #[error("{0}:// is unknown; use nvme://, iscsi://, nbd://, nbd+unix:// or a path")]
    Scheme(String),
    /// No host, or an invalid one.
    #[error("{0:?} is not a host: use a name, an IPv4 address or an IPv6 address in brackets")]
    Host(String),
    /// Invalid port.
    #[error("{0:?} is not a port: use 1 to 65535")]
    Port(String),
    /// A part is missing or invalid.
    #[error("{what}: {found:?} is invalid; the form is {form}")]
    Part {
        /// Which part.
        what: &'static str,
        /// The text found.
        found: String,
        /// The expected form of the URI.
        form: &'static str,
    },
    /// A `%` not followed by two hexadecimal digits, or bytes that are not UTF-8.
    #[error("{0:?} has an invalid % escape")]
    Percent(String),
    /// An unknown or repeated parameter.
    #[error("parameter {name:?} {why}; known: {known}")]
    Parameter {
        /// Its name.
        name: String,
        /// What is wrong with it.
        why: &'static str,
        /// The known parameters.
        known: &'static str,
    },
}

const NVME_FORM: &str = "nvme://HOST[:4420]/SUBNQN[?nsid=1&hostnqn=NQN]";
const ISCSI_FORM: &str = "iscsi://[USER[%SECRET]@]HOST[:3260]/IQN/LUN";
const NBD_FORM: &str = "nbd://HOST[:10809]/EXPORT";
const NBD_UNIX_FORM: &str = "nbd+unix:///EXPORT?socket=PATH";

impl FromStr for Target {
    type Err = UriError;

    fn from_str(text: &str) -> Result<Self, UriError> {
        if text.is_empty() || text.len() > MAX_LEN || text.contains('\0') {
            return Err(UriError::Length);
        }
        // A path may contain "://" too: only a prefix with the syntax of a scheme counts as one.
        let Some((scheme, rest)) = text.split_once("://").filter(|(scheme, _)| is_scheme(scheme))
        else {
            return Ok(Self::Path(text.into()));
        };
        match scheme.to_ascii_lowercase().as_str() {
            "nvme" | "nvme+tcp" => nvme(rest).map(Self::Nvme),
            "iscsi" => iscsi(rest).map(Self::Iscsi),
            "nbd" => nbd(rest).map(Self::Nbd),
            "nbd+unix" => nbd_unix(rest).map(Self::Nbd),
            _ => Err(UriError::Scheme(scheme.to_owned())),
        }
    }
}

/// RFC 3986, 3.1.
fn is_scheme(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
}

fn nvme(rest: &str) -> Result<NvmeUri, UriError> {
    let (rest, query) = split_query(rest);
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let [nsid, hostnqn] = parameters(query, ["nsid", "hostnqn"], "nsid, hostnqn")?;
    let part =
        |what, found: &str| UriError::Part { what, found: found.to_owned(), form: NVME_FORM };
    let nqn = |what, found: &str| {
        let nqn = unescape(found)?;
        let fits = nqn.starts_with("nqn.") && nqn.len() <= MAX_NQN && is_printable(&nqn);
        if fits { Ok(nqn) } else { Err(part(what, found)) }
    };
    let nsid = match nsid {
        None => 1,
        Some(text) => match text.parse() {
            // All ones names every namespace (NVMe Base 2.0, 3.2.1).
            Ok(nsid) if nsid != 0 && nsid != u32::MAX => nsid,
            _ => return Err(part("the namespace identifier", text)),
        },
    };
    Ok(NvmeUri {
        authority: self::authority(authority, 4420)?,
        subnqn: nqn("the name of the subsystem", path)?,
        nsid,
        hostnqn: hostnqn.map(|text| nqn("the name of the host", text)).transpose()?,
    })
}

/// CHAP secrets may contain anything but `@` and `/`, unescaped, as in libiscsi.
fn iscsi(rest: &str) -> Result<IscsiUri, UriError> {
    let part =
        |what, found: &str| UriError::Part { what, found: found.to_owned(), form: ISCSI_FORM };
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let (user, authority) = match authority.rsplit_once('@') {
        None => (None, authority),
        Some((user, authority)) => {
            let (name, secret) = match user.split_once('%') {
                None => (user, None),
                Some((name, secret)) => (name, Some(secret)),
            };
            if name.is_empty() || secret.is_some_and(str::is_empty) {
                // Omit the text found: it may be a secret.
                return Err(part("the user", "…"));
            }
            (Some((name.to_owned(), secret.map(ToOwned::to_owned))), authority)
        }
    };
    let (found, lun) = path.split_once('/').ok_or_else(|| part("the LUN", ""))?;
    let iqn = unescape(found)?;
    let named = ["iqn.", "eui.", "naa."].iter().any(|form| iqn.starts_with(form));
    if !named || iqn.len() > MAX_IQN || !is_printable(&iqn) {
        return Err(part("the name of the target", found));
    }
    // SAM-5, 4.7.7: single-level, flat space addressing ends at 16383.
    let lun = lun.parse().ok().filter(|lun| *lun < 1 << 14).ok_or_else(|| part("the LUN", lun))?;
    Ok(IscsiUri { authority: self::authority(authority, 3260)?, user, iqn, lun })
}

fn nbd(rest: &str) -> Result<NbdUri, UriError> {
    let (rest, query) = split_query(rest);
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let [] = parameters(query, [], "none for nbd://")?;
    let at = NbdAddress::Tcp(self::authority(authority, 10809)?);
    Ok(NbdUri { address: at, export: export(path, NBD_FORM)? })
}

fn nbd_unix(rest: &str) -> Result<NbdUri, UriError> {
    let part =
        |what, found: &str| UriError::Part { what, found: found.to_owned(), form: NBD_UNIX_FORM };
    let (rest, query) = split_query(rest);
    let [socket] = parameters(query, ["socket"], "socket")?;
    let Some(("", path)) = rest.split_once('/') else {
        return Err(part("a name without a host", rest));
    };
    let socket = unescape(socket.unwrap_or(""))?;
    if socket.is_empty() || socket.contains('\0') {
        return Err(part("the path of the socket", &socket));
    }
    Ok(NbdUri { address: NbdAddress::Unix(socket.into()), export: export(path, NBD_UNIX_FORM)? })
}

fn export(path: &str, form: &'static str) -> Result<String, UriError> {
    let export = unescape(path)?;
    if export.len() > MAX_EXPORT || export.contains('\0') {
        return Err(UriError::Part { what: "the export", found: path.to_owned(), form });
    }
    Ok(export)
}

fn split_query(rest: &str) -> (&str, &str) {
    rest.split_once('?').unwrap_or((rest, ""))
}

/// The values of the known parameters.
fn parameters<'a, const N: usize>(
    query: &'a str,
    names: [&str; N],
    known: &'static str,
) -> Result<[Option<&'a str>; N], UriError> {
    let mut values = [None; N];
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let bad = |why| UriError::Parameter { name: name.to_owned(), why, known };
        let place = names.iter().position(|n| *n == name).ok_or_else(|| bad("is unknown"))?;
        if values[place].replace(value).is_some() {
            return Err(bad("is given twice"));
        }
    }
    Ok(values)
}

fn authority(text: &str, port: u16) -> Result<Authority, UriError> {
    let bad = || UriError::Host(text.to_owned());
    let (host, rest) = match text.strip_prefix('[') {
        Some(bracketed) => {
            let (host, rest) = bracketed.split_once(']').ok_or_else(bad)?;
            // A zone (RFC 6874) follows the address.
            let address = host.split_once('%').map_or(host, |(address, _)| address);
            address.parse::<Ipv6Addr>().map_err(|_| bad())?;
            (host, rest)
        }
        None => {
            let end = text.find(':').unwrap_or(text.len());
            let host = &text[..end];
            let usable = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
            if host.is_empty() || host.len() > 253 || !host.chars().all(usable) {
                return Err(bad());
            }
            (host, &text[end..])
        }
    };
    let port = match rest.strip_prefix(':') {
        None if rest.is_empty() => port,
        None => return Err(bad()),
        Some(digits) => digits
            .parse()
            .ok()
            .filter(|port| *port != 0 && digits.bytes().all(|b| b.is_ascii_digit()))
            .ok_or_else(|| UriError::Port(digits.to_owned()))?,
    };
    Ok(Authority { host: host.to_owned(), port })
}

fn is_printable(text: &str) -> bool {
    text.chars().all(|c| !c.is_control() && !c.is_whitespace())
}

/// RFC 3986, 2.1.
fn unescape(text: &str) -> Result<String, UriError> {
    let bad = || UriError::Percent(text.to_owned());
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let mut digit = || bytes.next().and_then(|b| char::from(b).to_digit(16)).ok_or_else(bad);
        let value = digit()? * 16 + digit()?;
        out.push(u8::try_from(value).map_err(|_| bad())?);
    }
    String::from_utf8(out).map_err(|_| bad())
}

/// Escapes what needs it in a path or query.
fn escape(text: &str, out: &mut fmt::Formatter<'_>) -> fmt::Result {
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => write!(out, "{}", char::from(byte))?,
            b'-' | b'.' | b'_' | b'~' | b':' | b'/' | b',' | b'@' => {
                write!(out, "{}", char::from(byte))?;
            }
            _ => write!(out, "%{byte:02X}")?,
        }
    }
    Ok(())
}

impl fmt::Display for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// Omits secrets.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nvme(NvmeUri { authority: at, subnqn, nsid, hostnqn }) => {
                write!(f, "nvme://{at}/")?;
                escape(subnqn, f)?;
                write!(f, "?nsid={nsid}")?;
                if let Some(hostnqn) = hostnqn {
                    f.write_str("&hostnqn=")?;
                    escape(hostnqn, f)?;
                }
                Ok(())
            }
            Self::Iscsi(IscsiUri { authority: at, user, iqn, lun }) => {
                f.write_str("iscsi://")?;
                if let Some((user, _)) = user {
                    write!(f, "{user}@")?;
                }
                write!(f, "{at}/")?;
                escape(iqn, f)?;
                write!(f, "/{lun}")
            }
            Self::Nbd(NbdUri { address: NbdAddress::Tcp(at), export }) => {
                write!(f, "nbd://{at}/")?;
                escape(export, f)
            }
            Self::Nbd(NbdUri { address: NbdAddress::Unix(socket), export }) => {
                f.write_str("nbd+unix:///")?;
                escape(export, f)?;
                f.write_str("?socket=")?;
                escape(&socket.to_string_lossy(), f)
            }
            Self::Path(path) => path.display().fmt(f),
        }
    }
}

/// Omits the secret.
impl fmt::Debug for IscsiUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let user = self.user.as_ref().map(|(name, _)| name);
        f.debug_struct("IscsiUri")
            .field("at", &self.authority)
            .field("user", &user)
            .field("iqn", &self.iqn)
            .field("lun", &self.lun)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[path = "uri/tests.rs"]
mod tests;
