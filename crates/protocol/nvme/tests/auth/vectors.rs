//! Values that another implementation gives: Python's hashlib, hmac and pow, of what NVMe Base 2.0,
//! 8.13.5 says and Linux does. The messages are given by their SHA-256.

use nvme::auth::{Config, DhGroup, Hash, HostStep};
use sha2::{Digest, Sha256};

use super::pair::{Pair, config, policy, secret};

struct Vector {
    hash: u8,
    group: u8,
    host_secret: &'static str,
    controller_secret: &'static str,
    host_response: &'static str,
    controller_response: &'static str,
    challenge: &'static str,
    reply: &'static str,
    success1: &'static str,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn hashed(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// NVMe Base 2.0, 8.13.5.3 to 8.13.5.7: keys, responses, and every byte of the messages.
#[test]
fn messages_are_those_of_another_implementation() {
    for vector in VECTORS {
        let (hash, group) =
            (Hash::from_id(vector.hash).unwrap(), DhGroup::from_id(vector.group).unwrap());
        let config = Config {
            host_secret: secret(vector.host_secret),
            controller_secret: Some(secret(vector.controller_secret)),
            ..config(policy(hash, group), true)
        };
        let mut pair = Pair::new(config.clone(), config);
        let (challenge, reply) = pair.challenged();
        assert_eq!(hashed(&challenge), vector.challenge, "{hash:?} {group:?}");
        assert_eq!(hex(&reply[16..16 + hash.len()]), vector.host_response, "{hash:?} {group:?}");
        assert_eq!(hashed(&reply), vector.reply, "{hash:?} {group:?}");
        let success1 = pair.ask(&reply);
        assert_eq!(hex(&success1[16..]), vector.controller_response, "{hash:?} {group:?}");
        assert_eq!(hashed(&success1), vector.success1, "{hash:?} {group:?}");
        let HostStep::Authenticated(Some(success2)) = pair.tell(&success1) else {
            panic!("not proved")
        };
        assert_eq!(success2, [&[1, 4, 0, 0, 0x34, 0x12][..], &[0; 10]].concat());
        assert!(pair.send(&success2).is_none());
        assert!(pair.responder.is_authenticated());
    }
}

/// NVMe Base 2.0, 8.13.5.2, as Linux sends it: 8 bytes, and a descriptor with its lists at 4 and
/// 34.
#[test]
fn negotiate_is_laid_out_as_linux_has_it() {
    let both = nvme::auth::AuthPolicy::new(
        &[Hash::Sha512, Hash::Sha256],
        &[DhGroup::Ffdhe2048, DhGroup::Null],
    );
    let pair = Pair::new(config(both.clone().unwrap(), false), config(both.unwrap(), false));
    let mut expected = vec![0; 72];
    expected[4..6].copy_from_slice(&[0x34, 0x12]);
    expected[7] = 1;
    expected[8..14].copy_from_slice(&[1, 0, 2, 2, 3, 1]);
    expected[42..44].copy_from_slice(&[1, 0]);
    assert_eq!(pair.negotiate, expected);
}

const VECTORS: &[Vector] = &[
    Vector {
        hash: 1,
        group: 0,
        host_secret: "DHHC-1:00:ERgfJi00O0JJUFdeZWxzeoGIj5adpKuyucDHztXc4+oQKkVI:",
        controller_secret: "DHHC-1:01:g4qRmJ+mrbS7wsnQ197l7PP6AQgPFh0kKzI5QEdOVVxwYX7k:",
        host_response: "975718fdf7341f680f94393135be5e142f7cee2d9d7cd77cbca30dbe768a0b0c",
        controller_response: "f497aff46c2ca98f8280ce73f616eb9f3ccb78b68ddaeae8f5d848714af49dbf",
        challenge: "91d924fc792940140481246f31fa63257be6b328df62cebec515d69d42963678",
        reply: "1f3c70e96e46a82aff841a06b3b65011b47ba5d1288631f8fc9a53cefda02ed9",
        success1: "0bea656e7564fae256a0bea35c20284f63592decda24bd71328a88fa89d9eed6",
    },
    Vector {
        hash: 2,
        group: 0,
        host_secret: "DHHC-1:02:ERgfJi00O0JJUFdeZWxzeoGIj5adpKuyucDHztXc4+rx+P8GDRQbIikwNz5FTFNa7xKRhw==:",
        controller_secret: "DHHC-1:00:g4qRmJ+mrbS7wsnQ197l7PP6AQgPFh0kKzI5QEdOVVxjanF4f4aNlJuiqbC3vsXMprPbjw==:",
        host_response: "af4d7884b9e0c42d0e9bd54f5bd4581425fd0c29cb071d5a35eb74f9101643b34ee900ea085a3679663eaa434d0e4ffb",
        controller_response: "d18d19a78a2e36c809b5167e627e63f39fe6378960933407d4f74eefe9968219e26ddba9bda35a6b719ebe659e21f0db",
        challenge: "d1c96600adc2d2f28f8d758c85633f607f683e498c9cc1853ddd7c4b2b69cdc4",
        reply: "1798e8a1d13724c01bb309a0d48c7a098dae1fa827e17ae443d91d8dac1b88c6",
        success1: "afe8232df336f1e9cdea2aaa449006a714d26ef0cc8587a91ac90f8f76f9db57",
    },
    Vector {
        hash: 3,
        group: 0,
        host_secret: "DHHC-1:03:ERgfJi00O0JJUFdeZWxzeoGIj5adpKuyucDHztXc4+rx+P8GDRQbIikwNz5FTFNaYWhvdn2Ei5KZoKeutbzDyiJKp9I=:",
        controller_secret: "DHHC-1:03:g4qRmJ+mrbS7wsnQ197l7PP6AQgPFh0kKzI5QEdOVVxjanF4f4aNlJuiqbC3vsXM09rh6O/2/QQLEhkgJy41PNb9214=:",
        host_response: "29b8af9a3f097bc0c5eab795098a22850b5c1ffe4d0b4a4f960d0459f6289857109f1eb0ca50e0638cb5a1f0495fe5b05940eaa4f5d1004e5324c9821200af2b",
        controller_response: "c3b659d314c4c83a5391f9c84767b048c42327b88e88ac83382c652e7693d4925e8d81317dd244a4c978e68c8d4f2d97ba5761bbae812898b3002b259418d872",
        challenge: "9be6b442be1cf82003a4d5ad82efc1c7639136b74d95516e694f707b2a092e29",
        reply: "68020376ad0f35325bc954d2b9d72fca7f95cd894d056a8d28345c8b7d14ce8a",
        success1: "1361ba2294375ec6a83031d97fcbd897c82a382558f4c4714fd2855994aaf0b2",
    },
    Vector {
        hash: 1,
        group: 1,
        host_secret: "DHHC-1:01:ERgfJi00O0JJUFdeZWxzeoGIj5adpKuyucDHztXc4+oQKkVI:",
        controller_secret: "DHHC-1:00:g4qRmJ+mrbS7wsnQ197l7PP6AQgPFh0kKzI5QEdOVVxjanF4f4aNlJuiqbC3vsXM09rh6O/2/QQLEhkgJy41PNb9214=:",
        host_response: "a737d40d7b9cfeb665f53788e6b1c7361bc897157bdf6c60ea3725857450f846",
        controller_response: "b3ee66b8a79e341f9b1830cf25a1c8c771521564da6db3e12827eed311abe0c5",
        challenge: "142bd259692c363dd679ae47d7ec8427bd4501f3915d2f843c3c3c12c27681e1",
        reply: "407e03c595c33db426d99703c0c7fb537197b902c0eb481d579d7f4e40c1dc98",
        success1: "9f1fa84aaa8543cab0b6a1cacceba870c71368c7ee30af0dc6f00f221ffc5057",
    },
    Vector {
        hash: 2,
        group: 1,
        host_secret: "DHHC-1:00:ERgfJi00O0JJUFdeZWxzeoGIj5adpKuyucDHztXc4+oQKkVI:",
        controller_secret: "DHHC-1:02:g4qRmJ+mrbS7wsnQ197l7PP6AQgPFh0kKzI5QEdOVVxjanF4f4aNlJuiqbC3vsXMprPbjw==:",
        host_response: "3a720273493cc1df5a5c9688bd2455b36f8a69df7598ed735f96c1d0db9e57982217bf5e7576f2628ac8fe3969c1a1de",
        controller_response: "a7bc27a9374cccab7091627d60498f2b2bffc19fec7e5b265f64637a4ac5d02f98a6a16db7f7ab5dc938734520e834b4",
        challenge: "d4ac8848733064c97cff9b6833edc26680ca761268776d81d1a5ab376dda7ce9",
        reply: "4425c74599a861da4f17f032c3ab79cfe501b64e5e18d3e8d924fc6dc5dbcdb4",
        success1: "8f771df79799e80ff5c343162efd46c276ae3ae4a6c97e5bf840419ea0d41a62",
    },
    Vector {
        hash: 3,
        group: 1,
        host_secret: "DHHC-1:03:ERgfJi00O0JJUFdeZWxzeoGIj5adpKuyucDHztXc4+oQKkVI:",
        controller_secret: "DHHC-1:01:g4qRmJ+mrbS7wsnQ197l7PP6AQgPFh0kKzI5QEdOVVxjanF4f4aNlJuiqbC3vsXM09rh6O/2/QQLEhkgJy41PNb9214=:",
        host_response: "3bf46c4d8d838889b9b19a0cbb12772fa1134f8dba2cdf7f0be28eff28325263ec2d375d9983330017da2edf6259bb1cca5268a51cea01c998b36bc93110220d",
        controller_response: "92826d79d45315d53b67cd7fe891b91d25e8f4c76b74854eee920149e220180b2696c33c9958013dfc21acc5db087a1b1c67d14045bbcdc9dccaa4d052ee730f",
        challenge: "ae540f024a58632355113808c96b4e8d03afd401faf18e4f1a82f86713be3fb5",
        reply: "602f116e4407b4cdb0749b0a95f291a084181ccd3c6ced9b2ac2542c2959300e",
        success1: "641e64f22622533dda1c4bb092383fb6d9b1c1faeded13982473cf1c65dad0cc",
    },
];
