use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::identity::ClusterSecret;

const VOLUME: Uuid = Uuid::from_u128(0x3d81_3cbb_47fb_32ba_91df_831e_1593_ac29);

fn key(byte: u8) -> SealingKey {
    SealingKey::new([byte; KEY_LEN])
}

fn ring(bytes: &[u8]) -> Keyring {
    Keyring::new(bytes.iter().map(|byte| key(*byte)).collect()).unwrap()
}

fn place() -> SecretContext<'static> {
    SecretContext { volume: VOLUME, owner: SecretOwner::Initiator, user: "u" }
}

fn sealed(keyring: &Keyring, secret: &str) -> SealedSecret {
    keyring.seal(place(), secret.as_bytes()).unwrap().unwrap()
}

/// Later versions must be able to read what this version writes.
#[test]
fn the_golden_secret_opens_and_is_written() {
    let golden = include_str!("golden-secret.txt").trim_end();
    let sealed_secret =
        ring(&[0xa5]).seal_with_nonce([7; NONCE_LEN], place(), b"0123456789ab").unwrap();
    assert_eq!(sealed_secret.to_text(), golden);
    let read = SealedSecret::parse(golden).unwrap();
    assert_eq!(ring(&[1, 0xa5]).open(place(), &read), Ok(b"0123456789ab".to_vec()));
    assert_eq!(read.key.to_string(), golden[2..18]);
}

#[test]
fn the_golden_ring_opens_and_is_written() {
    let golden = include_str!("golden-ring.txt").trim_end();
    let secret = ClusterSecret::new([0x5a; 32]);
    let wrapped = wrapped_keyring::wrap_with_nonce([7; NONCE_LEN], &ring(&[1, 2]), VOLUME, &secret);
    assert_eq!(String::from_utf8(wrapped).unwrap(), golden);
    assert_eq!(unwrap_keyring(golden.as_bytes(), VOLUME, &secret), Ok(ring(&[1, 2])));
}

#[test]
fn a_secret_opens_at_its_place_and_nowhere_else() {
    let keyring = ring(&[1]);
    for secret in ["", "0123456789ab", &"x".repeat(MAX_SECRET)] {
        let sealed = sealed(&keyring, secret);
        assert_eq!(keyring.open(place(), &sealed), Ok(secret.as_bytes().to_vec()));
        let elsewhere = [
            SecretContext { volume: Uuid::nil(), ..place() },
            SecretContext { owner: SecretOwner::Volume, ..place() },
            SecretContext { user: "v", ..place() },
            SecretContext { user: "", ..place() },
        ];
        for context in elsewhere {
            assert_eq!(
                keyring.open(context, &sealed),
                Err(SecretUnsealError::AuthenticationFailed),
                "{context:?}"
            );
        }
    }
    assert_eq!(keyring.seal(place(), &[b'x'; MAX_SECRET + 1]), Ok(None));
    assert_eq!(Keyring::default().seal(place(), b"x"), Ok(None));
}

#[test]
fn every_changed_byte_is_noticed() {
    let keyring = ring(&[1]);
    let whole = sealed(&keyring, "0123456789ab");
    for i in 0..whole.bytes.len() {
        let mut other = whole.clone();
        other.bytes[i] ^= 1;
        assert_eq!(
            keyring.open(place(), &other),
            Err(SecretUnsealError::AuthenticationFailed),
            "byte {i}"
        );
    }
    let other = SealedSecret { key: KeyId(whole.key.0 ^ 1), ..whole };
    assert_eq!(keyring.open(place(), &other), Err(SecretUnsealError::UnknownKey(other.key)));
}

#[test]
fn neither_the_secret_nor_its_length_shows() {
    let keyring = ring(&[1]);
    let (a, b) = (sealed(&keyring, "0123456789ab"), sealed(&keyring, "0123456789ab"));
    assert_ne!(a, b, "each has a nonce of its own");
    assert_eq!(a.to_text().len(), sealed(&keyring, &"x".repeat(255)).to_text().len());
    assert!(!format!("{keyring:?}").contains("0101"), "keys stay out of logs");
}

#[test]
fn a_lost_key_is_named_and_another_one_is_of_no_use() {
    let sealed = sealed(&ring(&[1]), "0123456789ab");
    let why = ring(&[2]).open(place(), &sealed).unwrap_err();
    assert_eq!(why, SecretUnsealError::UnknownKey(key(1).id()));
    assert!(why.to_string().contains(&key(1).id().to_string()), "{why}");
    assert!(ring(&[2, 1]).open(place(), &sealed).is_ok(), "old keys still open");
}

#[test]
fn what_is_no_sealed_secret_is_said_to_be_none() {
    let good = sealed(&ring(&[1]), "0123456789ab").to_text();
    assert_eq!(SealedSecret::parse(&good).unwrap().to_text(), good);
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
        assert_eq!(SealedSecret::parse(&text), Err(SecretUnsealError::Damaged), "{text:.40}");
    }
}

#[test]
fn a_ring_opens_in_its_cluster_and_in_no_other() {
    let secret = ClusterSecret::new([0x5a; 32]);
    for keys in [&[][..], &[1], &[3, 1, 2]] {
        let stored = wrap_keyring(&ring(keys), VOLUME, &secret).unwrap();
        assert_eq!(unwrap_keyring(&stored, VOLUME, &secret), Ok(ring(keys)));
        assert_eq!(
            unwrap_keyring(&stored, Uuid::nil(), &secret),
            Err(KeyringError::AuthenticationFailed)
        );
        let other = ClusterSecret::new([0x5b; 32]);
        assert_eq!(
            unwrap_keyring(&stored, VOLUME, &other),
            Err(KeyringError::AuthenticationFailed)
        );
        let mut changed = stored.clone();
        *changed.last_mut().unwrap() = if stored.ends_with(b"A") { b'Q' } else { b'A' };
        assert!(unwrap_keyring(&changed, VOLUME, &secret).is_err());
    }
    for bad in [&b""[..], b"1", b"2.AAAA", b"1.", b"1.AAAA", b"\xff", b"1.+++"] {
        assert!(unwrap_keyring(bad, VOLUME, &secret).is_err(), "{bad:?}");
    }
}

#[test]
fn a_file_of_keys_is_for_its_owner_and_never_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("secrets.key");
    assert_eq!(key_file::read(&path).unwrap(), Keyring::default());
    std::fs::write(dir.path().join("secrets.key.new"), "half").unwrap();
    key_file::create(&path, &ring(&[1])).unwrap();
    assert_eq!(key_file::read(&path).unwrap(), ring(&[1]));
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let again = key_file::create(&path, &ring(&[2])).unwrap_err().to_string();
    assert!(again.contains("secrets.key"), "{again}");
    assert_eq!(key_file::read(&path).unwrap(), ring(&[1]), "a key that is there stays");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
    let open = key_file::read(&path).unwrap_err().to_string();
    assert!(open.contains("secrets.key") && open.contains("chmod 600"), "{open}");
}

#[test]
fn what_is_wrong_with_a_file_of_keys_is_said_without_a_key() {
    let line = "a5".repeat(KEY_LEN);
    assert_eq!(key_file::parse(&format!("# x\n\n  {line}  \r\n")), Ok(ring(&[0xa5])));
    assert_eq!(key_file::parse(&key_file::to_text(&ring(&[2, 1]))), Ok(ring(&[2, 1])));
    assert_eq!(key_file::parse(""), Ok(Keyring::default()));
    for (text, why) in [
        (format!("{line}\n{}", &line[1..]), "line 2"),
        (format!("{line}{line}"), "line 1"),
        (line.replace('5', "g"), "line 1"),
        (format!("{line}\n{line}"), "duplicate key"),
        ((0..17).map(|n| format!("{n:064x}\n")).collect(), "more than 16"),
    ] {
        let error = key_file::parse(&text).unwrap_err();
        assert!(error.contains(why) && !error.contains("a5a5"), "{error}");
    }
}
