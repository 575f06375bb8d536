//! Which targets there are, and where (RFC 7143 13.3 and appendix C).

use std::net::SocketAddr;

use ::iscsi::initiator::{Answer, Request};
use ::iscsi::name::Name;
use ::iscsi::text::Pairs;
use rt::Core;

use super::connect::{ConnectError, Connector, portal};
use super::live::Failed;
use super::options::Options;
use crate::drive::Staging;

/// A target that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its name.
    pub name: String,
    /// Where it is, and the tag of the portal group of each. Where a target names no address, it is where it
    /// was found.
    pub portals: Vec<(SocketAddr, u16)>,
}

/// Asks at [`Options::address`] which targets there are for this initiator; which one the options name does not
/// matter. Addresses that are names, and targets whose names are none, are left out.
///
/// # Errors
/// Why the portal is not reached, or does not tell.
pub async fn discover(
    core: &Core,
    options: Options,
    staging: Staging,
) -> Result<Vec<Found>, ConnectError> {
    let address = options.address;
    let connector = Connector::new(core, options, staging, true)?;
    let live = connector.bring_up().await?;
    let answer = live.ask(Request::Text(b"SendTargets=All\0".to_vec())).await;
    // It has told what it had to tell, or has not.
    let _ = live.log_out().await;
    live.close();
    match answer? {
        Answer::Text(text) => parse(&text, address).map_err(ConnectError::Failed),
        _ => Err(Failed::Nonsense("it does not tell its targets").into()),
    }
}

pub(super) fn parse(text: &[u8], asked: SocketAddr) -> Result<Vec<Found>, Failed> {
    let mut out: Vec<Found> = Vec::new();
    let mut named = false;
    for pair in Pairs::of(text) {
        let (key, value) = pair.map_err(|_| Failed::Nonsense("malformed text"))?;
        match (key, out.last_mut()) {
            ("TargetName", _) => {
                out.push(Found { name: value.to_owned(), portals: vec![(asked, 1)] });
                named = false;
            }
            ("TargetAddress", Some(target)) => {
                if !std::mem::replace(&mut named, true) {
                    target.portals.clear();
                }
                let group = value.rsplit_once(',').and_then(|(_, group)| group.parse().ok());
                target.portals.extend(portal(value).map(|at| (at, group.unwrap_or(1))));
            }
            ("TargetAddress", None) => return Err(Failed::Nonsense("an address of no target")),
            _ => {}
        }
    }
    // Nobody could log in to it, and it may be anything for whom it is shown to.
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

    /// RFC 7143 4.2.7: who shows what was found shows names, and nothing that does things to a terminal.
    #[test]
    fn targets_whose_names_are_none_are_left_out() {
        let at: SocketAddr = "192.0.2.9:3260".parse().unwrap();
        let text = b"TargetName=\x1b[2J\0TargetAddress=192.0.2.4,1\0TargetName=iqn.2026-01.a\0";
        let found = parse(text, at).unwrap();
        assert_eq!((found.len(), found[0].name.as_str()), (1, "iqn.2026-01.a"));
        assert_eq!(found[0].portals, [(at, 1)], "the address of another");
    }
}
