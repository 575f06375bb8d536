//! However TCP cuts the stream, and whenever memory comes, the same bytes go out.

use crate::common::connect;
use crate::common::driver::{Session, Target};
use crate::common::{pattern, rw};
use nvme::Sqe;
use nvme::entry::NvmOpcode;
use nvme::testing::{Reply, ScriptedHost};
use proptest::prelude::*;
use zerocopy::IntoBytes;

#[derive(Clone, Debug)]
enum Step {
    Write { at: u64, blocks: u32, in_capsule: bool },
    Read { at: u64, blocks: u32 },
    Flush,
    Outside,
    Conflict,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0u64..3900, 1u32..16).prop_map(|(at, blocks)| Step::Write {
            at,
            blocks,
            in_capsule: true
        }),
        (0u64..3900, 1u32..160).prop_map(|(at, blocks)| Step::Write {
            at,
            blocks,
            in_capsule: false
        }),
        (0u64..3900, 1u32..160).prop_map(|(at, blocks)| Step::Read { at, blocks }),
        Just(Step::Flush),
        Just(Step::Outside),
        Just(Step::Conflict),
    ]
}

/// What goes out in answer to `steps`, each sent once all before it are done.
fn run(host: ScriptedHost, steps: &[Step], cuts: &[usize]) -> (Vec<u8>, Vec<u8>) {
    let mut s = Session::enabled(Target::default(), host);
    let io = s.target.open();
    let mut at = 0;
    let mut portion = || {
        at += 1;
        cuts.get(at % cuts.len().max(1)).copied().unwrap_or(usize::MAX)
    };
    let mut out = Vec::new();
    let mut talk = |s: &mut Session, bytes: &[u8]| {
        s.target.feed(io, bytes, &mut portion);
        let mut sent = s.target.take(io, &mut portion);
        out.extend(&sent);
        host.parse(&mut sent)
    };
    talk(&mut s, &host.ic_req());
    let (sqe, data) = connect(1, s.cntlid).encode(1);
    talk(&mut s, &host.capsule(sqe, data.as_bytes()));
    for (cid, step) in (2u16..).zip(steps) {
        match *step {
            Step::Write { at, blocks, in_capsule } => {
                let data = pattern(at, blocks as usize * 512);
                let sqe = rw(NvmOpcode::Write, cid, at, blocks);
                if in_capsule && data.len() <= 16384 {
                    talk(&mut s, &host.capsule(sqe, &data));
                } else {
                    let r2t = talk(&mut s, &host.command(sqe));
                    assert!(matches!(r2t[..], [Reply::R2t { .. }]));
                    talk(&mut s, &host.answer(&r2t[0], &data, 10_000));
                }
            }
            Step::Read { at, blocks } => {
                talk(&mut s, &host.command(rw(NvmOpcode::Read, cid, at, blocks)));
            }
            Step::Flush => {
                talk(&mut s, &host.command(Sqe::new(NvmOpcode::Flush.0, cid, 1)));
            }
            Step::Outside => {
                let sqe = rw(NvmOpcode::Write, cid, 1 << 50, 8);
                talk(&mut s, &host.capsule(sqe, &pattern(1, 4096)));
            }
            Step::Conflict => {
                let flush = host.command(Sqe::new(NvmOpcode::Flush.0, cid, 1));
                talk(&mut s, &[flush.clone(), flush].concat());
            }
        }
    }
    assert_eq!(s.target.conn(io).in_flight(), 0);
    (out, s.target.disk)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn any_portions_give_the_same_output(
        steps in prop::collection::vec(step(), 1..12),
        cuts in prop::collection::vec(prop_oneof![1usize..90, 1usize..20_000], 1..40),
        digests in any::<bool>(),
        hpda in prop::sample::select(vec![0u8, 3, 31]),
    ) {
        let host = ScriptedHost { header_digest: digests, data_digest: digests, hpda };
        let whole = run(host, &steps, &[]);
        let cut = run(host, &steps, &cuts);
        prop_assert_eq!(whole.1, cut.1, "what was written");
        prop_assert_eq!(whole.0, cut.0, "what was answered");
    }
}
