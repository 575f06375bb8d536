use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::identity::ClusterSecret;

const VOLUME: Uuid = Uuid::from_u128(0x3d81_3cbb_47fb_32ba_91df_831e_1593_ac29);

fn key(byte: u8) -> Key {
    Key::new([byte; KEY_LEN])
}

fn ring(bytes: &[u8]) -> Ring {
    Ring::new(bytes.iter().map(|byte| key(*byte)).collect()).unwrap()
}

fn place() -> Place<'static> {
    Place { volume: VOLUME, whose: Whose::Initiator, user: "u" }
}

fn sealed(ring: &Ring, secret: &str) -> Sealed {
    ring.seal(place(), secret.as_bytes()).unwrap().unwrap()
}

/// What this version writes, every later one reads.
#[test]
fn the_golden_secret_opens_and_is_written() {
    let golden = include_str!("golden-secret.txt").trim_end();
    let made = ring(&[0xa5]).seal_with([7; NONCE], place(), b"0123456789ab").unwrap();
    assert_eq!(made.to_text(), golden);
    let read = Sealed::parse(golden).unwrap();
    assert_eq!(ring(&[1, 0xa5]).open(place(), &read), Ok(b"0123456789ab".to_vec()));
    assert_eq!(read.key.to_string(), golden[2..18]);
}

#[test]
fn the_golden_ring_opens_and_is_written() {
    let golden = include_str!("golden-ring.txt").trim_end();
    let secret = ClusterSecret::new([0x5a; 32]);
    let made = wrapped::wrap_with([7; NONCE], &ring(&[1, 2]), VOLUME, &secret);
    assert_eq!(String::from_utf8(made).unwrap(), golden);
    assert_eq!(unwrap(golden.as_bytes(), VOLUME, &secret), Ok(ring(&[1, 2])));
}

#[test]
fn a_secret_opens_at_its_place_and_nowhere_else() {
    let ring = ring(&[1]);
    for secret in ["", "0123456789ab", &"x".repeat(MAX_SECRET)] {
        let sealed = sealed(&ring, secret);
        assert_eq!(ring.open(place(), &sealed), Ok(secret.as_bytes().to_vec()));
        let elsewhere = [
            Place { volume: Uuid::nil(), ..place() },
            Place { whose: Whose::Volume, ..place() },
            Place { user: "v", ..place() },
            Place { user: "", ..place() },
        ];
        for place in elsewhere {
            assert_eq!(ring.open(place, &sealed), Err(CannotOpen::Wrong), "{place:?}");
        }
    }
    assert_eq!(ring.seal(place(), &[b'x'; MAX_SECRET + 1]), Ok(None));
    assert_eq!(Ring::default().seal(place(), b"x"), Ok(None));
}

#[test]
fn every_changed_byte_is_noticed() {
    let ring = ring(&[1]);
    let whole = sealed(&ring, "0123456789ab");
    for i in 0..whole.bytes.len() {
        let mut other = whole.clone();
        other.bytes[i] ^= 1;
        assert_eq!(ring.open(place(), &other), Err(CannotOpen::Wrong), "byte {i}");
    }
    let other = Sealed { key: KeyId(whole.key.0 ^ 1), ..whole };
    assert_eq!(ring.open(place(), &other), Err(CannotOpen::NoKey(other.key)));
}

#[test]
fn neither_the_secret_nor_its_length_shows() {
    let ring = ring(&[1]);
    let (a, b) = (sealed(&ring, "0123456789ab"), sealed(&ring, "0123456789ab"));
    assert_ne!(a, b, "each has a nonce of its own");
    assert_eq!(a.to_text().len(), sealed(&ring, &"x".repeat(255)).to_text().len());
    assert!(!format!("{ring:?}").contains("0101"), "keys stay out of logs");
}

#[test]
fn a_lost_key_is_named_and_another_one_is_of_no_use() {
    let sealed = sealed(&ring(&[1]), "0123456789ab");
    let why = ring(&[2]).open(place(), &sealed).unwrap_err();
    assert_eq!(why, CannotOpen::NoKey(key(1).id()));
    assert!(why.to_string().contains(&key(1).id().to_string()), "{why}");
    assert!(ring(&[2, 1]).open(place(), &sealed).is_ok(), "old keys still open");
}

#[test]
fn what_is_no_sealed_secret_is_said_to_be_none() {
    let good = sealed(&ring(&[1]), "0123456789ab").to_text();
    assert_eq!(Sealed::parse(&good).unwrap().to_text(), good);
    let (head, body) = good.rsplit_once('.').unwrap();
    let bad = [
        String::new(),
        "1".to_owned(),
        "1..".to_owned(),
        good.replacen('1', "2", 1),
        format!("{head}.{}", &body[..body.len() - 1]),
        format!("{good}A"),
        format!("{head}.{}", "A".repeat(1 << 20)),
        good.to_uppercase(),
        good.replacen("1.", "1.+", 1),
        format!(" {good}"),
    ];
    for text in bad {
        assert_eq!(Sealed::parse(&text), Err(CannotOpen::Damaged), "{text:.40}");
    }
}

#[test]
fn a_ring_opens_in_its_cluster_and_in_no_other() {
    let secret = ClusterSecret::new([0x5a; 32]);
    for keys in [&[][..], &[1], &[3, 1, 2]] {
        let held = wrap(&ring(keys), VOLUME, &secret).unwrap();
        assert_eq!(unwrap(&held, VOLUME, &secret), Ok(ring(keys)));
        assert_eq!(unwrap(&held, Uuid::nil(), &secret), Err(BadRing::Wrong));
        let other = ClusterSecret::new([0x5b; 32]);
        assert_eq!(unwrap(&held, VOLUME, &other), Err(BadRing::Wrong));
        let mut changed = held.clone();
        *changed.last_mut().unwrap() = if held.ends_with(b"A") { b'Q' } else { b'A' };
        assert!(unwrap(&changed, VOLUME, &secret).is_err());
    }
    for bad in [&b""[..], b"1", b"2.AAAA", b"1.", b"1.AAAA", b"\xff", b"1.+++"] {
        assert!(unwrap(bad, VOLUME, &secret).is_err(), "{bad:?}");
    }
}

#[test]
fn a_file_of_keys_is_for_its_owner_and_never_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("secrets.key");
    assert_eq!(file::read(&path).unwrap(), Ring::default());
    std::fs::write(dir.path().join("secrets.key.new"), "half").unwrap();
    file::create(&path, &ring(&[1])).unwrap();
    assert_eq!(file::read(&path).unwrap(), ring(&[1]));
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let again = file::create(&path, &ring(&[2])).unwrap_err().to_string();
    assert!(again.contains("secrets.key"), "{again}");
    assert_eq!(file::read(&path).unwrap(), ring(&[1]), "a key that is there stays");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
    let open = file::read(&path).unwrap_err().to_string();
    assert!(open.contains("secrets.key") && open.contains("chmod 600"), "{open}");
}

#[test]
fn what_is_wrong_with_a_file_of_keys_is_said_without_a_key() {
    let line = "a5".repeat(KEY_LEN);
    assert_eq!(file::parse(&format!("# x\n\n  {line}  \r\n")), Ok(ring(&[0xa5])));
    assert_eq!(file::parse(&file::to_text(&ring(&[2, 1]))), Ok(ring(&[2, 1])));
    assert_eq!(file::parse(""), Ok(Ring::default()));
    for (text, why) in [
        (format!("{line}\n{}", &line[1..]), "line 2"),
        (format!("{line}{line}"), "line 1"),
        (line.replace('5', "g"), "line 1"),
        (format!("{line}\n{line}"), "twice"),
        ((0..17).map(|n| format!("{n:064x}\n")).collect(), "more than 16"),
    ] {
        let said = file::parse(&text).unwrap_err();
        assert!(said.contains(why) && !said.contains("a5a5"), "{said}");
    }
}
