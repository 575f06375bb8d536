//! Names of targets, from untrusted input.

mod fuzz_input;

use proptest::prelude::*;

proptest! {
    #[test]
    fn arbitrary_text_does_not_panic(text in ".*") {
        fuzz_input::run(&text);
    }

    #[test]
    fn uri_like_text_does_not_panic(
        scheme in "nvme|iscsi|nbd|nbd\\+unix|http",
        rest in "([a-z.:/%?&=@\\[\\]0-9]|nqn\\.|iqn\\.|nsid=|socket=|hostnqn=|::1|%2f){0,20}",
    ) {
        fuzz_input::run(&format!("{scheme}://{rest}"));
    }
}
