use super::*;

fn parse(text: &str) -> Result<Target, UriError> {
    text.parse()
}

fn at(host: &str, port: u16) -> Authority {
    Authority { host: host.to_owned(), port }
}

#[test]
fn each_form_is_read() {
    let subnqn = "nqn.2026-01.com.example:disk".to_owned();
    let nvme = |at, nsid, hostnqn| {
        Target::Nvme(NvmeUri { authority: at, subnqn: subnqn.clone(), nsid, hostnqn })
    };
    let iqn = "iqn.2026-01.com.example:disk".to_owned();
    let nbd = |at, export: &str| Target::Nbd(NbdUri { address: at, export: export.to_owned() });
    let user = Some(("me".to_owned(), Some("se%cret".to_owned())));
    for (text, expected) in [
        ("nvme://10.0.0.1/nqn.2026-01.com.example:disk", nvme(at("10.0.0.1", 4420), 1, None)),
        (
            "NVMe://[fe80::1%eth0]:4421/nqn.2026-01.com.example%3Adisk?hostnqn=nqn.me&nsid=7",
            nvme(at("fe80::1%eth0", 4421), 7, Some("nqn.me".to_owned())),
        ),
        (
            "iscsi://me%se%cret@san.example/iqn.2026-01.com.example%3adisk/3",
            Target::Iscsi(IscsiUri { authority: at("san.example", 3260), user, iqn, lun: 3 }),
        ),
        ("nbd://[::1]:10810/a%20disk", nbd(NbdAddress::Tcp(at("::1", 10810)), "a disk")),
        ("nbd://host", nbd(NbdAddress::Tcp(at("host", 10809)), "")),
        (
            "nbd+unix:///disk?socket=/run/x.sock",
            nbd(NbdAddress::Unix("/run/x.sock".into()), "disk"),
        ),
        ("/dev/sda", Target::Path("/dev/sda".into())),
        ("./odd name://x", Target::Path("./odd name://x".into())),
    ] {
        assert_eq!(parse(text), Ok(expected), "{text}");
    }
}

#[test]
fn invalid_uris_are_refused_with_a_reason() {
    for (text, part) in [
        ("", "1 to 4096"),
        ("http://host/x", "http:// is unknown"),
        ("nvme:///nqn.x", "is not a host"),
        ("nvme://host", "the name of the subsystem"),
        ("nvme://host/disk", "the name of the subsystem"),
        ("nvme://host/nqn.x?nsid=0", "the namespace identifier"),
        ("nvme://host/nqn.x?nsid=4294967295", "the namespace identifier"),
        ("nvme://host/nqn.x?nsid=1&nsid=1", "is given twice"),
        ("nvme://host/nqn.x?lun=1", "is unknown; known: nsid, hostnqn"),
        ("nvme://host:0/nqn.x", "is not a port"),
        ("nvme://host:+1/nqn.x", "is not a port"),
        ("nvme://::1/nqn.x", "an IPv6 address in brackets"),
        ("nvme://[::g]/nqn.x", "is not a host"),
        ("nvme://[::1]x/nqn.x", "is not a host"),
        ("nvme://host/nqn.%4", "an invalid % escape"),
        ("nvme://host/nqn.%ff", "an invalid % escape"),
        ("iscsi://host/iqn.x", "the LUN"),
        ("iscsi://host/iqn.x/16384", "the LUN"),
        ("iscsi://host/disk/0", "the name of the target"),
        ("iscsi://%secret@host/iqn.x/0", "the user"),
        ("nbd://host/x?socket=/x", "unknown; known: none for nbd://"),
        ("nbd+unix:///x", "the path of the socket"),
        ("nbd+unix://host/x?socket=/x", "a name without a host"),
    ] {
        let error = parse(text).expect_err(text).to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
}

#[test]
fn secrets_are_not_shown() {
    for text in ["iscsi://me%hush@host/iqn.x/0", "iscsi://%hush@host/iqn.x/0"] {
        let shown = format!("{:?} {:?}", parse(text), parse(text).map(|t| t.to_string()));
        assert!(!shown.contains("hush"), "{shown}");
    }
}
