//! The command line: help, refusals, exit codes.

use std::process::{Command, Stdio};

use crate::common::{PROGRAM, TestNode, cli, closed_pipe, texts};

#[test]
fn without_a_node_it_says_where_it_looked() {
    let out = cli("unix:/nowhere/api.sock", &["status"]);
    assert_eq!(out.status.code(), Some(3));
    let (_, stderr) = texts(&out);
    insta::assert_snapshot!(stderr, @r"
    windrose: no node responds at unix:/nowhere/api.sock: No such file or directory (os error 2)
              check that the node runs (`systemctl status windrose`) and that you may use its socket; --api selects another one
    ");
}

#[test]
fn refusals_name_the_thing_and_the_next_step() {
    let test_node = TestNode::new("");
    let node = test_node.start();
    let output = test_node.fails(4, &["volume", "show", "web"]);
    insta::assert_snapshot!(output, @r"
    windrose: there is no volume web
              `windrose volume list` shows the volumes
    ");
    test_node.ok(&["volume", "create", "web", "--size", "10M"]);
    let output = test_node.fails(1, &["volume", "create", "web", "--size", "20M"]);
    insta::assert_snapshot!(output, @r"
    windrose: volume web exists with another size (10 MiB, not 20 MiB)
              choose another name, or see `windrose volume show web`
    ");
    let output =
        test_node.fails(1, &["volume", "create", "web", "--size", "10M", "--pool", "nope"]);
    assert!(
        output.contains("exists with another place") && output.contains("not in pool nope"),
        "{output}"
    );
    test_node.ok(&["volume", "create", "web", "--size", "10M"]);
    let output = test_node.fails(1, &["volume", "grow", "web", "--size", "5M"]);
    insta::assert_snapshot!(output, @r"
    windrose: volume web has 10 MiB and cannot be made smaller
              create a smaller volume and copy the data
    ");
    let output = test_node.fails(2, &["volume", "delete", "web"]);
    insta::assert_snapshot!(output, @r"
    windrose: volume web was not deleted: there is no terminal for a confirmation
              use --yes to delete it without a prompt
    ");
    assert_eq!(node.stop(), Some(0));
}

/// As with `| head`, which closes the pipe early.
#[test]
fn output_that_nobody_reads_is_no_panic() {
    let node = TestNode::new("");
    let _node = node.start();
    let socket = format!("unix:{}/api.sock", node.path().display());
    let config = node.config().to_str().unwrap();
    let run = |api: &str, args: &[&str], stdout: Stdio, stderr: Stdio| {
        let mut command = Command::new(PROGRAM);
        command.args(args).env("WINDROSE_API", api).stdin(Stdio::null());
        command.stdout(stdout).stderr(stderr).output().unwrap()
    };
    let outputs: [&[&str]; 8] = [
        &["completions", "bash"],
        &["completions", "zsh"],
        &["--help"],
        &["volume", "create", "--help"],
        &["--version"],
        &["node", "--check", "--config", config],
        &["status"],
        &["volume", "list", "--json"],
    ];
    for args in outputs {
        let out = run(&socket, args, closed_pipe(), Stdio::piped());
        let (_, stderr) = texts(&out);
        assert_eq!((out.status.code(), &*stderr), (Some(0), ""), "{args:?}");
    }
    let errors: [(&str, &[&str], i32); 3] = [
        (&socket, &["volume", "show", "nothing"], 4),
        ("unix:/nowhere", &["status"], 3),
        (&socket, &["frobnicate"], 2),
    ];
    for (api, args, code) in errors {
        let out = run(api, args, Stdio::piped(), closed_pipe());
        assert_eq!(out.status.code(), Some(code), "{args:?}");
    }
}

#[test]
fn a_node_whose_log_nobody_reads_goes_on() {
    let test_node = TestNode::new("[log]\nlevel = \"debug\"\n");
    let node = test_node.start_with_closed_stderr();
    test_node.cli(&["volume", "create", "web", "--size", "10M"]);
    assert!(test_node.cli(&["volume", "show", "web"]).status.success());
    assert_eq!(node.stop(), Some(0));
}

/// Arguments, and what standard error must contain.
const WRONG: &[(&[&str], &str)] = &[
    (&["volume", "create", "Web", "--size", "1G"], "\"Web\" is not a valid volume name"),
    (&["volume", "create", "web"], "--size <SIZE>"),
    (&["volume", "create", "--size", "1G"], "<NAME>..."),
    (&["volume", "create", "a", "b", "--size", "1G", "--path", "/x"], "holds one volume"),
    (&["volume", "create", "web", "--size", "10GB"], "decimal units are not used"),
    (&["volume", "create", "web", "--size", "1000"], "use 1 MiB to 256 TiB"),
    (&["volume", "create", "web", "--size", "1G", "--block-size", "1024"], "use 512 or 4096"),
    (&["volume", "create", "web", "--size", "1G", "--allow", "bob"], "not a valid initiator"),
    (&["volume", "create", "web", "--size", "1G", "--chap", "secret"], "USER:SECRET-FILE"),
    (
        &["volume", "create", "web", "--size", "1G", "--chap", "u:/nowhere"],
        "/nowhere: No such file",
    ),
    (
        &["volume", "create", "web", "--size", "1G", "--path", "x", "--device", "y"],
        "cannot be used",
    ),
    (&["volume", "allow", "web"], "<INITIATORS>"),
    (&["volume", "chap", "web"], "USER:SECRET-FILE"),
    (&["volume", "dhchap", "web", "--off"], "--host <NQN>"),
    (&["volume", "dhchap", "web", "--host", "nqn.2014-08.org.nvmexpress:h"], "--secret <FILE>"),
    (
        &[
            "volume",
            "dhchap",
            "web",
            "--host",
            "nqn.2014-08.org.nvmexpress:h",
            "--secret",
            "/nowhere",
        ],
        "/nowhere: No such file",
    ),
    (&["volume", "tls", "web", "--off"], "--host <NQN>"),
    (&["volume", "tls", "web", "--host", "nqn.2014-08.org.nvmexpress:h"], "--key <FILE>"),
    (
        &["volume", "tls", "web", "--host", "nqn.2014-08.org.nvmexpress:h", "--key", "/nowhere"],
        "/nowhere: No such file",
    ),
    (&["volume", "export", "web", "--protocols", "fc"], "iscsi, nvme, vhost-user, none"),
    (&["pool", "create", "tank", "--raid", "5", "/dev/a", "/dev/b"], "needs at least 3"),
    (&["pool", "create", "tank", "--raid", "4", "/dev/a"], "use 0, 1, 10, 5 or 6"),
    (
        &["pool", "create", "tank", "--raid", "0", "--chunk-size", "8K", "/dev/a"],
        "use 16K, 32K, 64K or 128K",
    ),
    (&["pool", "create", "Tank", "--raid", "0", "/dev/a"], "\"Tank\" is not a valid pool name"),
    (&["pool", "open", "tank"], "--without <DISK>"),
    (&["pool", "replace", "tank", "S1"], "--with <DISK>"),
    (&["--api", "http://x", "status"], "unix:/path/to/socket or https://host:port"),
    (&["frobnicate"], "unrecognized subcommand"),
];

#[test]
fn wrong_command_lines_are_refused_before_anything_happens() {
    for (args, says) in WRONG {
        let out = cli("unix:/nowhere", args);
        let (_, stderr) = texts(&out);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(stderr.contains(says), "{args:?}: {stderr}");
    }
}

#[test]
fn secrets_come_from_files_and_are_not_shown() {
    let test_node = TestNode::new("");
    let node = test_node.start();
    let (one, two) = (test_node.path().join("one"), test_node.path().join("two"));
    std::fs::write(&one, "hush-hush-hush\n").unwrap();
    std::fs::write(&two, "hush-hush-back\n").unwrap();
    let (user, mutual) = (format!("u:{}", one.display()), format!("m:{}", two.display()));
    let create =
        ["volume", "create", "web", "--size", "1M", "--protocols", "iscsi", "--allow", "any"];
    let shown = test_node.ok(&[&create[..], &["--chap", &user, "--chap-mutual", &mutual]].concat());
    assert!(shown.contains("user u, mutual as m") && !shown.contains("hush"), "{shown}");
    assert!(!test_node.json(&["volume", "show", "web"]).to_string().contains("hush"));
    let shown = test_node.ok(&["volume", "chap", "web", "--off"]);
    assert!(!shown.contains("CHAP"), "{shown}");
    assert_eq!(node.stop(), Some(0));
    assert!(!test_node.log().contains("hush"));
}

#[test]
fn secrets_of_hosts_come_from_files_and_are_not_shown() {
    const SECRET: &str = "DHHC-1:01:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAACtVQoZ:";
    const BACK: &str =
        "DHHC-1:02:WlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaWlpaBgfU4w==:";
    let test_node = TestNode::new("");
    let node = test_node.start();
    let file = |name: &str, secret: &str| {
        let path = test_node.path().join(name);
        std::fs::write(&path, format!("{secret}\n")).unwrap();
        path.display().to_string()
    };
    let (one, two) = (file("one", SECRET), file("two", BACK));
    let nqn = "nqn.2014-08.org.nvmexpress:h";
    test_node.ok(&[
        "volume",
        "create",
        "web",
        "--size",
        "1M",
        "--protocols",
        "nvme",
        "--allow",
        nqn,
    ]);
    let of_host = ["volume", "dhchap", "web", "--host", nqn];
    let shown = test_node.ok(&[&of_host[..], &["--secret", &one, "--ctrl-secret", &two]].concat());
    assert!(shown.contains(&format!("{nqn}, mutual")) && !shown.contains("DHHC"), "{shown}");
    assert!(shown.contains("--dhchap-ctrl-secret MUTUAL-SECRET"), "{shown}");
    assert!(!test_node.json(&["volume", "show", "web"]).to_string().contains("DHHC"));
    let same =
        test_node.fails(2, &[&of_host[..], &["--secret", &one, "--ctrl-secret", &one]].concat());
    assert!(same.contains("different secrets") && !same.contains("DHHC"), "{same}");
    let mistyped = file("mistyped", &SECRET.replace("oZ:", "oa:"));
    let refused = test_node.fails(1, &[&of_host[..], &["--secret", &mistyped]].concat());
    assert!(refused.contains("mistyped") && !refused.contains("DHHC"), "{refused}");
    let shown = test_node.json(&["volume", "show", "web"]);
    assert_eq!(shown["access"]["dhchap_hosts"][0]["mutual"], true, "nothing was changed");
    let shown = test_node.ok(&[&of_host[..], &["--off"]].concat());
    assert!(!shown.contains("DH-HMAC-CHAP") && !shown.contains("SECRET"), "{shown}");
    assert_eq!(node.stop(), Some(0));
    assert!(!test_node.log().contains("DHHC"));
}

#[test]
fn keys_of_hosts_come_from_files_and_are_not_shown() {
    const KEY: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
    let test_node = TestNode::new("");
    let node = test_node.start();
    let file = |name: &str, key: &str| {
        let path = test_node.path().join(name);
        std::fs::write(&path, format!("{key}\n")).unwrap();
        path.display().to_string()
    };
    let key = file("key", KEY);
    let nqn = "nqn.2014-08.org.nvmexpress:h";
    test_node.ok(&[
        "volume",
        "create",
        "web",
        "--size",
        "1M",
        "--protocols",
        "nvme",
        "--allow",
        nqn,
    ]);
    let of_host = ["volume", "tls", "web", "--host", nqn];
    let required = |test_node: &TestNode| {
        test_node.json(&["volume", "show", "web"])["access"]["tls_hosts"][0]["required"].clone()
    };
    let shown = test_node.ok(&[&of_host[..], &["--key", &key, "--optional"]].concat());
    assert!(shown.contains(&format!("{nqn}, optional")) && !shown.contains("NVMeTLS"), "{shown}");
    assert!(shown.contains(" --tls") && shown.contains("--keydata KEY"), "{shown}");
    assert_eq!(required(&test_node), false);
    let shown = test_node.ok(&[&of_host[..], &["--key", &key]].concat());
    assert!(!shown.contains("optional"), "{shown}");
    assert_eq!(required(&test_node), true, "unless it is said not to be");
    assert!(!test_node.json(&["volume", "show", "web"]).to_string().contains("NVMeTLS"));
    let mistyped = file("mistyped", &KEY.replace("rZ:", "rA:"));
    let refused = test_node.fails(1, &[&of_host[..], &["--key", &mistyped, "--optional"]].concat());
    assert!(refused.contains("mistyped") && !refused.contains("NVMeTLS"), "{refused}");
    let blank = file("blank", "hush hush");
    let refused = test_node.fails(2, &[&of_host[..], &["--key", &blank]].concat());
    assert!(refused.contains("gen-tls-key") && !refused.contains("hush"), "{refused}");
    assert_eq!(required(&test_node), true, "nothing was changed");
    let shown = test_node.ok(&[&of_host[..], &["--off"]].concat());
    assert!(!shown.contains("TLS") && !shown.contains("--tls"), "{shown}");
    assert_eq!(node.stop(), Some(0));
    assert!(!test_node.log().contains("NVMeTLS"));
}

#[test]
fn completions_and_manual_pages_are_there() {
    for shell in ["bash", "zsh", "fish"] {
        let out = cli("unix:/nowhere", &["completions", shell]);
        assert!(out.status.success() && texts(&out).0.contains("windrose"), "{shell}");
    }
    let dir = tempfile::tempdir().unwrap();
    let out = cli("unix:/nowhere", &["man", dir.path().to_str().unwrap()]);
    assert!(out.status.success(), "{}", texts(&out).1);
    for page in ["windrose.1", "windrose-volume-create.1", "windrose-node.1", "windrose.toml.5"] {
        let text = std::fs::read_to_string(dir.path().join(page)).expect(page);
        assert!(text.contains(".TH"), "{page}");
    }
    let settings = std::fs::read_to_string(dir.path().join("windrose.toml.5")).unwrap();
    assert!(settings.contains("\\fBcores.poll_window_us\\fR"), "{settings}");
}

#[test]
fn help_names_the_exit_codes() {
    let out = cli("unix:/nowhere", &["--help"]);
    let (stdout, _) = texts(&out);
    assert!(out.status.success());
    for code in
        ["0  done", "3  no node responds", "6  for `status` and `attach`: data cannot be reached"]
    {
        assert!(stdout.contains(code), "{stdout}");
    }
}

#[test]
fn attach_says_what_it_can_be() {
    let out = cli("unix:/nowhere", &["attach", "--help"]);
    let (stdout, _) = texts(&out);
    for front_end in ["--vhost-user <PATH>", "--nbd <PATH>", "--fuse <DIRECTORY>"] {
        assert!(stdout.contains(front_end), "{stdout}");
    }
    let out = cli("unix:/nowhere", &["attach", "web", "--fuse", "/mnt", "--fuse-mode", "777"]);
    assert_eq!(out.status.code(), Some(2), "a disk is no program");
}

/// Files as disks of a pool, by their paths.
fn disks<const N: usize>(node: &TestNode) -> [String; N] {
    std::array::from_fn(|n| {
        let path = node.path().join(format!("disk{n}"));
        std::fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
        path.display().to_string()
    })
}

#[test]
fn pools_of_disks_survive_the_node() {
    let test_node = TestNode::new("");
    let node = test_node.start();
    assert!(test_node.ok(&["pool", "list"]).contains("windrose pool create NAME"));
    let output = test_node.fails(4, &["pool", "show", "tank"]);
    insta::assert_snapshot!(output, @r"
    windrose: there is no pool tank on this node
              `windrose pool list` shows the pools
    ");
    let [a, b, c, spare, more] = disks(&test_node);
    let made =
        test_node.ok(&["pool", "create", "tank", "--raid", "5", "--spare", &spare, &a, &b, &c]);
    assert!(made.contains("RAID 5, 3 disks in a stripe, chunks of 64 KiB"), "{made}");
    assert!(made.contains("May fail  1 disk") && made.contains(&spare), "{made}");
    let shown = test_node.ok(&["volume", "create", "vm1", "--size", "20M", "--pool", "tank"]);
    assert!(shown.contains("Stored in   pool tank"), "{shown}");
    test_node.ok(&["volume", "create", "vm2", "--size", "20M", "--pool", "tank", "--thick"]);
    node.kill();
    let node = test_node.start();
    let listed = test_node.json(&["volume", "list"]);
    assert!(
        listed["volumes"].as_array().unwrap().iter().all(|v| v["state"]["kind"] == "online"),
        "{listed}"
    );
    test_node.ok(&["pool", "add", "tank", &more]);
    assert_eq!(test_node.json(&["pool", "show", "tank"])["disks"].as_array().unwrap().len(), 5);
    test_node.ok(&["pool", "scrub", "tank"]);
    let output = test_node.fails(1, &["pool", "delete", "tank", "--yes"]);
    insta::assert_snapshot!(output, @r"
    windrose: pool tank has volumes: vm1, vm2
              delete them first: windrose volume delete vm1; windrose volume delete vm2
    ");
    let output =
        test_node.fails(1, &["pool", "open", "tank", "--without", "S1", "--confirm", "tank"]);
    assert!(output.contains("pool tank is open"), "{output}");
    for volume in ["vm1", "vm2"] {
        test_node.ok(&["volume", "delete", volume, "--yes"]);
    }
    let output = test_node.fails(2, &["pool", "delete", "tank"]);
    insta::assert_snapshot!(output, @r"
    windrose: pool tank was not deleted: there is no terminal for a confirmation
              use --yes to delete it without a prompt
    ");
    test_node.ok(&["pool", "delete", "tank", "--yes"]);
    assert_eq!(test_node.json(&["pool", "list"])["pools"].as_array().unwrap().len(), 0);
    assert_eq!(node.stop(), Some(0));
}

#[test]
fn a_disk_is_named_by_a_serial_number_with_slashes_or_by_a_path_from_here() {
    let test_node = TestNode::new("");
    let node = test_node.start();
    let far = test_node.path().join("images of machines/100%?/#1/some more of a path that is long");
    std::fs::create_dir_all(&far).unwrap();
    let disks = ["a", "b", "c"].map(|name| {
        let path = far.join(name);
        std::fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
        path.to_str().unwrap().to_owned()
    });
    let words = ["pool", "create", "tank", "--raid", "1"];
    let words: Vec<&str> = words.into_iter().chain(disks.iter().map(String::as_str)).collect();
    test_node.ok(&words);
    let shown = test_node.json(&["pool", "show", "tank"]);
    let serial = shown["disks"][2]["serial"].as_str().unwrap();
    // It looks like a relative path.
    assert!(serial.contains('/') && !serial.starts_with('/'), "{serial}");
    test_node.ok(&["pool", "remove", "tank", serial]);
    let says = test_node.fails(1, &["pool", "remove", "tank", "no/such"]);
    assert!(says.contains("has no disk") && says.contains("/no/such"), "{says}");
    assert_eq!(node.stop(), Some(0));
}

#[test]
fn several_volumes_are_created_by_one_command_and_each_is_told_of() {
    let node = TestNode::new("[limits]\nvolumes = 14\n");
    let _node = node.start();
    let names: Vec<String> = (1..=10).map(|n| format!("web-{n}")).collect();
    let command = |names: &[String], more: &[&str]| {
        let words = ["volume", "create"].into_iter().map(str::to_owned);
        let more = more.iter().map(|word| (*word).to_owned());
        words.chain(names.iter().cloned()).chain(more).collect::<Vec<_>>()
    };
    let words = command(&names, &["--size", "4M"]);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let lines = node.ok(&words);
    let expected: Vec<_> = names.iter().map(|n| format!("{n}: created, 4 MiB, online")).collect();
    assert_eq!(lines.trim_end(), expected.join("\n"));
    // Repeating it gives the same; a volume that differs is reported, and does not stop the others.
    assert_eq!(node.ok(&words), lines);
    let twice = node.fails(1, &["volume", "create", "new-0", "new-0", "--size", "4M"]);
    assert!(twice.contains("volume new-0 is named twice"), "{twice}");
    let mixed = ["new-1", "web-1", "new-2"].map(str::to_owned);
    let words = command(&mixed, &["--size", "8M"]);
    let out = node.cli(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let (stdout, stderr) = texts(&out);
    insta::assert_snapshot!(stdout, @r"
    new-1: created, 8 MiB, online
    web-1: NOT created: volume web-1 exists with another size (4 MiB, not 8 MiB) (choose another name, or see `windrose volume show web-1`)
    new-2: created, 8 MiB, online
    ");
    insta::assert_snapshot!(stderr, @r"
    windrose: 1 of 3 volumes not created; the created ones are kept
              run the same command again to create the missing ones
    ");
    assert_eq!(out.status.code(), Some(1));
    // Concurrent creations do not exceed the limit either.
    let more: Vec<String> = (1..=8).map(|n| format!("more-{n}")).collect();
    let words = command(&more, &["--size", "4M", "--json"]);
    let out = node.cli(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let output: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let made = output["volumes"].as_array().unwrap().iter().filter(|v| v["error"].is_null());
    assert_eq!((made.count(), out.status.code()), (2, Some(1)), "{output}");
    assert_eq!(node.json(&["volume", "list"])["volumes"].as_array().unwrap().len(), 14);
}
