//! Formats tokens and join requests for people.

use api::{JoinInfo, JoinList, JoinState, NodeRole, TokenInfo, TokenList, TokenState};
use wire::plural;

use super::{format_duration, table};

#[expect(clippy::disallowed_methods, reason = "a command runs outside of cores")]
fn now_s() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

fn role(role: NodeRole) -> &'static str {
    match role {
        NodeRole::Data => "data",
        NodeRole::Witness => "witness",
    }
}

/// What a token that was just created admits.
pub(crate) fn created_token(token: &TokenInfo) -> String {
    let TokenInfo { id, remaining_uses, expires_s, created_s, role, requires_approval, .. } = token;
    let admitted = match (remaining_uses, role) {
        (None, None) => "any number of nodes".to_owned(),
        (None, Some(NodeRole::Witness)) => "any number of witnesses".to_owned(),
        (None, Some(NodeRole::Data)) => "any number of nodes with data".to_owned(),
        (Some(uses), None) => plural(*uses, "node").to_string(),
        (Some(uses), Some(NodeRole::Witness)) => plural(*uses, "witness").to_string(),
        (Some(uses), Some(NodeRole::Data)) => format!("{} with data", plural(*uses, "node")),
    };
    let within = format_duration(expires_s.saturating_sub(*created_s));
    let approval = if *requires_approval { ", each of which waits for approval" } else { "" };
    format!("token {id} is for {admitted}{approval}, within {within}")
}

/// `windrose cluster token list`.
pub(crate) fn tokens(list: &TokenList) -> String {
    if list.tokens.is_empty() {
        return "There are no tokens. To make one:\n  windrose cluster token".to_owned();
    }
    let now = now_s();
    let rows = list.tokens.iter().map(|token| {
        let state = match token.state {
            TokenState::Valid => "valid",
            TokenState::UsedUp => "used up",
            TokenState::Expired => "expired",
            TokenState::Revoked => "revoked",
        };
        let expires = match token.expires_s.checked_sub(now) {
            Some(left) if left > 0 => format!("in {}", format_duration(left)),
            _ => format!("{} ago", format_duration(now - token.expires_s)),
        };
        vec![
            token.id.clone(),
            state.to_owned(),
            token.remaining_uses.map_or("any number".to_owned(), |uses| uses.to_string()),
            expires,
            token.role.map_or("any", role).to_owned(),
            if token.requires_approval { "needed" } else { "-" }.to_owned(),
            format!(
                "{} ago at {}",
                format_duration(now.saturating_sub(token.created_s)),
                token.created_by
            ),
        ]
    });
    table(&["TOKEN", "STATE", "USES LEFT", "EXPIRES", "ROLE", "APPROVAL", "MADE"], &[], rows)
}

/// `windrose cluster joins`.
pub(crate) fn joins(list: &JoinList) -> String {
    if list.joins.is_empty() {
        return "No node has asked to join in the last week.".to_owned();
    }
    let now = now_s();
    let rows = list.joins.iter().map(|join| {
        let addresses: Vec<_> = join.addresses.iter().map(ToString::to_string).collect();
        vec![
            join.id.clone(),
            state(join),
            join.name.clone(),
            role(join.role).to_owned(),
            addresses.join(", "),
            join.requested_from.to_string(),
            join.token.clone(),
            format!("{} ago", format_duration(now.saturating_sub(join.requested_s))),
        ]
    });
    let head = ["JOIN", "STATE", "NAME", "ROLE", "ADDRESSES", "FROM", "TOKEN", "ASKED"];
    let mut text = table(&head, &[], rows);
    if let Some(waiting) = list.joins.iter().find(|join| join.state == JoinState::Waiting) {
        let id = &waiting.id;
        text.push_str(&format!(
            "\n\nTo admit or reject {}:\n  windrose cluster approve {id}\n  windrose cluster \
             refuse {id}",
            waiting.name
        ));
    }
    text
}

fn state(join: &JoinInfo) -> String {
    let by = join.decided_by.as_ref().map(|by| format!(" at {by}")).unwrap_or_default();
    let node = join.node.map(|node| format!(" as node {node}")).unwrap_or_default();
    match join.state {
        JoinState::Waiting => "WAITS FOR APPROVAL".to_owned(),
        JoinState::Approved => format!("approved{by}, has not joined yet"),
        JoinState::Refused => format!("refused{by}"),
        JoinState::Ended => "ended".to_owned(),
        JoinState::Admitted => format!("admitted{node}"),
        JoinState::Joined => format!("joined{node}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_and_joins_are_shown_with_what_is_to_be_done() {
        let token = TokenInfo {
            id: "1a2b3c4d".into(),
            state: TokenState::Valid,
            remaining_uses: Some(1),
            expires_s: now_s() + 9000,
            role: Some(NodeRole::Witness),
            requires_approval: true,
            created_by: "a".into(),
            created_s: now_s() - 3600,
        };
        let text = created_token(&token);
        assert!(text.contains("token 1a2b3c4d is for 1 witness, each of which waits"), "{text}");
        let over = TokenInfo {
            state: TokenState::Expired,
            remaining_uses: None,
            expires_s: 1,
            ..token.clone()
        };
        let shown = tokens(&TokenList { tokens: vec![token, over] });
        for part in ["valid", "expired", "any number", "in 2 h", "ago at a", "needed", "witness"] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        assert!(tokens(&TokenList { tokens: Vec::new() }).contains("windrose cluster token"));
        let join = JoinInfo {
            id: "5e6f7a8b".into(),
            name: "b".into(),
            role: NodeRole::Data,
            addresses: vec!["192.0.2.2:7480".parse().unwrap()],
            requested_from: "192.0.2.9".parse().unwrap(),
            version: "0.1.0".into(),
            token: "1a2b3c4d".into(),
            requested_s: now_s(),
            state: JoinState::Waiting,
            node: None,
            decided_by: None,
        };
        let joined = JoinInfo { state: JoinState::Joined, node: Some(2), ..join.clone() };
        let shown = joins(&JoinList { joins: vec![join, joined] });
        for part in ["WAITS", "joined as node 2", "192.0.2.2:7480", "cluster approve 5e6f7a8b"] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
    }
}
