//! SendTargets discovery (RFC 7143 13.3 and appendix C).

use std::net::SocketAddr;

use ::iscsi::initiator::{Answer, Request};
use ::iscsi::name::Name;
use ::iscsi::text::Pairs;
use rt::Core;

use super::active_session::SessionError;
use super::connect::{ConnectError, Connector, parse_portal};
use super::options::Options;
use crate::connection::Staging;

/// A discovered target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveredTarget {
    /// Its name.
    pub name: String,
    /// Its addresses with their portal group tags; the discovery address if the target reports
    /// none.
    pub portals: Vec<(SocketAddr, u16)>,
}

/// Lists the targets that the portal at [`Options::address`] offers to this initiator; the target
/// name in the options is ignored. Host names as addresses and invalid target names are left out.
///
/// # Errors
/// If the portal is unreachable or does not answer.
pub async fn discover(
    core: &Core,
    options: Options,
    staging: Staging,
) -> Result<Vec<DiscoveredTarget>, ConnectError> {
    let address = options.address;
    let connector = Connector::new(core, options, staging, true)?;
    let live = connector.establish().await?;
    let answer = live.request(Request::Text(b"SendTargets=All\0".to_vec())).await;
    // The list is read; a failed logout does not matter.
    let _ = live.log_out().await;
    live.close();
    match answer? {
        Answer::Text(text) => parse(&text, address).map_err(ConnectError::Request),
        _ => Err(SessionError::InvalidResponse("it does not list its targets").into()),
    }
}

pub(super) fn parse(text: &[u8], asked: SocketAddr) -> Result<Vec<DiscoveredTarget>, SessionError> {
    let mut out: Vec<DiscoveredTarget> = Vec::new();
    let mut named = false;
    for pair in Pairs::of(text) {
        let (key, value) = pair.map_err(|_| SessionError::InvalidResponse("malformed text"))?;
        match (key, out.last_mut()) {
            ("TargetName", _) => {
                out.push(DiscoveredTarget { name: value.to_owned(), portals: vec![(asked, 1)] });
                named = false;
            }
            ("TargetAddress", Some(target)) => {
                if !std::mem::replace(&mut named, true) {
                    target.portals.clear();
                }
                let group = value.rsplit_once(',').and_then(|(_, group)| group.parse().ok());
                target.portals.extend(parse_portal(value).map(|at| (at, group.unwrap_or(1))));
            }
            ("TargetAddress", None) => {
                return Err(SessionError::InvalidResponse("an address without a target"));
            }
            _ => {}
        }
    }
    // An invalid name cannot be logged in to, and could harm the terminal that shows it.
    out.retain(|target| target.name.parse::<Name>().is_ok());
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 7143 appendix C.
    #[test]
    fn lists_of_targets_are_read() {
        let at: SocketAddr = "192.0.2.9:3260".parse().unwrap();
        let text = b"TargetName=iqn.2026-01.a\0TargetAddress=192.0.2.1:3260,2\0\
            TargetAddress=[2001:db8::1],3\0TargetAddress=name.example:3260,1\0\
            TargetName=iqn.2026-01.b\0";
        let found = parse(text, at).unwrap();
        assert_eq!((found.len(), &found[1].portals[..]), (2, &[(at, 1)][..]));
        let portals = [("192.0.2.1:3260", 2), ("[2001:db8::1]:3260", 3)];
        assert_eq!(found[0].portals, portals.map(|(at, group)| (at.parse().unwrap(), group)));
        for bad in [&b"TargetAddress=192.0.2.1:3260,1\0"[..], b"TargetName=iqn.a", b"nothing\0"] {
            assert!(parse(bad, at).is_err());
        }
        assert_eq!(parse(b"", at), Ok(Vec::new()));
    }

    /// RFC 7143 4.2.7: a client that prints the list prints names, never terminal escapes.
    #[test]
    fn targets_whose_names_are_none_are_left_out() {
        let at: SocketAddr = "192.0.2.9:3260".parse().unwrap();
        let text = b"TargetName=\x1b[2J\0TargetAddress=192.0.2.4,1\0TargetName=iqn.2026-01.a\0";
        let found = parse(text, at).unwrap();
        assert_eq!((found.len(), found[0].name.as_str()), (1, "iqn.2026-01.a"));
        assert_eq!(found[0].portals, [(at, 1)], "the address of another");
    }
}
