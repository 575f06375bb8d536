//! Any text as the name of a target: it is read or refused, and what is read is shown as what it
//! was.

use initiator::uri::{IscsiUri, Target};

/// Reads `text`; what must hold is asserted. Shared by the property test and the fuzz target.
pub(crate) fn run(text: &str) {
    let Ok(target) = text.parse::<Target>() else { return };
    // A secret is not shown again.
    if matches!(&target, Target::Iscsi(IscsiUri { user: Some(_), .. })) {
        return;
    }
    let shown = target.to_string();
    // Escapes take more room than what they stand for.
    if shown.len() <= 4096 {
        assert_eq!(shown.parse::<Target>().as_ref(), Ok(&target), "{text:?} is shown as {shown:?}");
    }
}
