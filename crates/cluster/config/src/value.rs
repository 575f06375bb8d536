//! Parsers of single values. An error says what is wrong with the value; the caller adds what is
//! allowed.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use target::limits::{MAX_REQUEST_BYTES, MIN_POOL_REQUESTS};
use toml::de::DeValue;

/// Most entries that a list may have.
const MAX_LIST: usize = 256;

/// Most characters of a value that a message repeats.
const MAX_SHOWN_CHARS: usize = 60;

type Parsed<T> = Result<T, String>;

fn shorten(s: &str) -> String {
    s.chars().take(MAX_SHOWN_CHARS).collect()
}

/// A value as a message shows it.
fn show(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(s) => format!("{:?}", shorten(s)),
        DeValue::Integer(i) => shorten(i.as_str()),
        DeValue::Float(f) => shorten(f.as_str()),
        DeValue::Boolean(b) => b.to_string(),
        other => format!("this {}", other.type_str()),
    }
}

fn refused<T>(value: &DeValue<'_>) -> Parsed<T> {
    Err(format!("{} is not allowed", show(value)))
}

pub(super) fn text(value: &DeValue<'_>) -> Parsed<String> {
    value.as_str().map(str::to_owned).map_or_else(|| refused(value), Ok)
}

pub(super) fn boolean(value: &DeValue<'_>) -> Parsed<bool> {
    value.as_bool().map_or_else(|| refused(value), Ok)
}

pub(super) fn integer(value: &DeValue<'_>, allowed: RangeInclusive<u64>) -> Parsed<u64> {
    let Some(integer) = value.as_integer() else { return refused(value) };
    match u64::from_str_radix(integer.as_str(), integer.radix()) {
        Ok(n) if allowed.contains(&n) => Ok(n),
        _ => refused(value),
    }
}

pub(super) fn count(value: &DeValue<'_>, allowed: RangeInclusive<u64>) -> Parsed<usize> {
    let n = integer(value, allowed)?;
    usize::try_from(n).or_else(|_| refused(value))
}

pub(super) fn seconds(value: &DeValue<'_>, allowed: RangeInclusive<u64>) -> Parsed<Duration> {
    integer(value, allowed).map(Duration::from_secs)
}

/// Seconds, or `"off"` for never.
pub(super) fn seconds_or_off(
    value: &DeValue<'_>,
    allowed: RangeInclusive<u64>,
) -> Parsed<Option<Duration>> {
    match value.as_str() {
        Some("off") => Ok(None),
        _ => seconds(value, allowed).map(Some),
    }
}

pub(super) fn millis(value: &DeValue<'_>, allowed: RangeInclusive<u64>) -> Parsed<Duration> {
    integer(value, allowed).map(Duration::from_millis)
}

/// Bytes as a number or as text with a unit.
pub(super) fn size(value: &DeValue<'_>, allowed: RangeInclusive<u64>) -> Parsed<u64> {
    let bytes = match value.as_str() {
        Some(s) => s.parse::<api::Size>().map_err(|e| e.to_string())?.0,
        None => integer(value, 0..=u64::MAX)?,
    };
    if allowed.contains(&bytes) { Ok(bytes) } else { refused(value) }
}

/// Buffer memory of a core; enough for the minimum number of requests of the largest size.
pub(super) fn core_memory(value: &DeValue<'_>, most: u64) -> Parsed<u64> {
    let (bytes, least) = (size(value, 0..=most)?, MIN_POOL_REQUESTS * MAX_REQUEST_BYTES);
    if bytes >= least {
        return Ok(bytes);
    }
    let (request, least) = (api::Size(MAX_REQUEST_BYTES), api::Size(least));
    let given = api::Size(bytes);
    Err(format!(
        "{given} cannot hold {MIN_POOL_REQUESTS} requests of the largest size, {request} each: \
         at least {least} are needed"
    ))
}

pub(super) fn path(value: &DeValue<'_>) -> Parsed<PathBuf> {
    let path = PathBuf::from(text(value)?);
    let clean = !path.as_os_str().as_encoded_bytes().contains(&0);
    if path.is_absolute() && clean { Ok(path) } else { refused(value) }
}

/// Longest path of a socket directory. A socket's path has at most 107 bytes, and a volume's name
/// up to 63 of them: whether it fits shows when the node listens at it.
const MAX_SOCKET_DIRECTORY: usize = 80;

/// A socket directory, or `None` for an empty text.
pub(super) fn socket_directory(value: &DeValue<'_>) -> Parsed<Option<PathBuf>> {
    if text(value)?.is_empty() {
        return Ok(None);
    }
    let path = path(value)?;
    if path.as_os_str().len() <= MAX_SOCKET_DIRECTORY { Ok(Some(path)) } else { refused(value) }
}

pub(super) fn address(value: &DeValue<'_>) -> Parsed<SocketAddr> {
    let at: SocketAddr = text(value)?.parse().or_else(|_| refused(value))?;
    // Map IPv4-mapped IPv6 addresses to IPv4.
    Ok(SocketAddr::new(at.ip().to_canonical(), at.port()))
}

/// An address that other nodes can connect to.
pub(super) fn own_address(value: &DeValue<'_>) -> Parsed<SocketAddr> {
    let at = address(value)?;
    if at.ip().is_unspecified() || at.port() == 0 { refused(value) } else { Ok(at) }
}

/// The name of a program, or its path.
pub(super) fn program(value: &DeValue<'_>) -> Parsed<PathBuf> {
    let given = text(value)?;
    let name = !given.is_empty() && !given.contains(['/', '\0']);
    if name { Ok(given.into()) } else { path(value) }
}

pub(super) fn domain(value: &DeValue<'_>) -> Parsed<String> {
    let given = text(value)?;
    let printable = given.chars().all(|c| !c.is_control());
    if printable && (1..=64).contains(&given.chars().count()) { Ok(given) } else { refused(value) }
}

/// A server: a name or an address (IPv6 in brackets), and a port.
pub(super) fn host_and_port(value: &DeValue<'_>) -> Parsed<String> {
    let given = text(value)?;
    let good = given.rsplit_once(':').is_some_and(|(host, port)| {
        let port = port.parse::<u16>().is_ok_and(|port| port != 0);
        let literal = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        let host = match literal {
            Some(v6) => v6.parse::<std::net::Ipv6Addr>().is_ok(),
            None => {
                let allowed = |b: u8| b.is_ascii_alphanumeric() || b == b'.' || b == b'-';
                (1..=253).contains(&host.len()) && host.bytes().all(allowed)
            }
        };
        port && host
    });
    if good { Ok(given) } else { refused(value) }
}

pub(super) fn endpoints(value: &DeValue<'_>) -> Parsed<Vec<String>> {
    list(value, |v| {
        let url = text(v)?;
        if ::cluster::identity::is_member_url(&url) { Ok(url) } else { refused(v) }
    })
}

fn list<T>(value: &DeValue<'_>, one: impl Fn(&DeValue<'_>) -> Parsed<T>) -> Parsed<Vec<T>> {
    let Some(array) = value.as_array() else { return refused(value) };
    if array.len() > MAX_LIST {
        return Err(format!("{} entries are too many (at most {MAX_LIST})", array.len()));
    }
    array.iter().map(|v| one(v.get_ref())).collect()
}

pub(super) fn addresses(value: &DeValue<'_>) -> Parsed<Vec<SocketAddr>> {
    reject_duplicates(list(value, address)?)
}

pub(super) fn own_addresses(value: &DeValue<'_>) -> Parsed<Vec<SocketAddr>> {
    reject_duplicates(list(value, own_address)?)
}

fn reject_duplicates(all: Vec<SocketAddr>) -> Parsed<Vec<SocketAddr>> {
    match all.iter().enumerate().find(|(i, a)| a.port() != 0 && all[..*i].contains(a)) {
        Some((_, twice)) => Err(format!("{twice} is named twice")),
        None => Ok(all),
    }
}

pub(super) fn cpus(value: &DeValue<'_>) -> Parsed<Vec<usize>> {
    let all = list(value, |v| count(v, 0..=4095))?;
    match all.iter().enumerate().find(|(i, cpu)| all[..*i].contains(cpu)) {
        Some((_, twice)) => Err(format!("processor {twice} is named twice")),
        None => Ok(all),
    }
}

pub(super) fn choice<T: Copy>(value: &DeValue<'_>, choices: &[(&str, T)]) -> Parsed<T> {
    let given = text(value)?;
    let found = choices.iter().find(|(word, _)| *word == given);
    found.map_or_else(|| refused(value), |(_, choice)| Ok(*choice))
}

/// A name prefix: `kind` (`iqn.` or `nqn.`), a year and month, and a domain in reverse.
pub(super) fn authority(value: &DeValue<'_>, kind: &str) -> Parsed<String> {
    let given = text(value)?;
    let owner = given.strip_prefix(kind).and_then(|owner| owner.split_once('.'));
    let valid = owner.is_some_and(|(month, domain)| {
        is_month(month) && is_host_name(domain) && domain == domain.to_ascii_lowercase()
    });
    if valid && given.len() <= 128 { Ok(given) } else { refused(value) }
}

/// A year and a month such as `2014-08`, when the authority owned its domain.
fn is_month(s: &str) -> bool {
    let Some((year, month)) = s.split_once('-') else { return false };
    year.len() == 4
        && year.bytes().all(|b| b.is_ascii_digit())
        && month.len() == 2
        && ("01"..="12").contains(&month)
}

pub(super) fn node_name(value: &DeValue<'_>) -> Parsed<String> {
    let given = text(value)?;
    if is_host_name(&given) { Ok(given) } else { refused(value) }
}

/// Whether `s` is a host name by RFC 1123 2.1.
pub(super) fn is_host_name(s: &str) -> bool {
    let label = |l: &str| {
        (1..=63).contains(&l.len())
            && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
            && !l.starts_with('-')
            && !l.ends_with('-')
    };
    s.len() <= 253 && s.split('.').all(label)
}
