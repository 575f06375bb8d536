//! Names of targets, from untrusted input.

mod play;

use proptest::prelude::*;

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in ".*") {
        play::play(&text);
    }

    #[test]
    fn what_looks_like_a_uri_is_read_or_refused(
        scheme in "nvme|iscsi|nbd|nbd\\+unix|http",
        rest in "([a-z.:/%?&=@\\[\\]0-9]|nqn\\.|iqn\\.|nsid=|socket=|hostnqn=|::1|%2f){0,20}",
    ) {
        play::play(&format!("{scheme}://{rest}"));
    }
}
