//! Other people's clients against our server, and our client against other people's servers. A test
//! whose program is not installed says so; `./run test` installs them.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "nbd/common.rs"]
mod common;
#[path = "common/tools.rs"]
mod tools;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::time::Duration;

use attach::nbd::Options as Served;
use block::testing::conformance::{self, MIN_BYTES, MIN_POOL, Subject};
use block::testing::faulty::OpKind;
use block::testing::{Rng, TestClient};
use block::{BufferPool, Dev, Error, MemOptions};
use common::{Site, on_core};
use initiator::nbd::{Disk, Options};
use nbd::Address;
use rt::Core;
use tempfile::TempDir;
use testkit::{installed, skipped};
use tokio::time::Instant;
use tools::{outcome, tool};

fn path_of(at: &Address) -> &Path {
    let Address::Unix(path) = at else { panic!("a Unix socket") };
    path
}

fn uri(at: &Address, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", path_of(at).display())
}

const MIB: u64 = 1 << 20;

async fn site(core: &Core, dir: &TempDir, bytes: u64, block_size: u32) -> Site {
    let mem = MemOptions::new(block_size, bytes / u64::from(block_size));
    Site::unix(core, dir.path(), mem, Served::new("disk")).await
}

/// Contents that are not zeroes, with holes.
fn image(dir: &TempDir, name: &str, bytes: u64) -> (PathBuf, Vec<u8>) {
    let mut rng = Rng::new(bytes);
    let mut data = Vec::new();
    while data.len() < bytes as usize {
        let hole = rng.one_in(3);
        let piece = (0..4096u32).map(|i| if hole { 0 } else { (i ^ i >> 8) as u8 | 1 });
        data.extend(piece.map(|b| if hole { 0 } else { b ^ (rng.u64() as u8 & 0xfe) }));
    }
    let path = dir.path().join(name);
    std::fs::write(&path, &data).unwrap();
    (path, data)
}

#[test]
fn qemu_img_copies_compares_and_maps() {
    if !installed(&["qemu-img"]) {
        return;
    }
    on_core(async |core| {
        for block_size in [512, 4096] {
            let dir = TempDir::new().unwrap();
            let site = site(&core, &dir, 16 * MIB, block_size).await;
            let (file, data) = image(&dir, "image", 16 * MIB);
            let (file, uri) = (file.to_str().unwrap(), uri(&site.at, "disk"));
            tool(&core, "qemu-img", &["convert", "-n", "-W", "-f", "raw", "-O", "raw", file, &uri])
                .await;
            tool(&core, "qemu-img", &["compare", "-f", "raw", "-F", "raw", file, &uri]).await;
            let client = TestClient::new(&site.dev, &BufferPool::new(4 * MIB as usize).unwrap());
            let mib = u32::try_from(MIB).unwrap() / block_size;
            for n in 0..16u32 {
                let read = client.read((n * mib).into(), mib).await.unwrap().to_vec();
                assert!(read == data[n as usize * MIB as usize..][..MIB as usize], "MiB {n}");
            }
            let map = tool(&core, "qemu-img", &["map", "--output=json", &uri]).await;
            assert!(map.contains("\"zero\": true") && map.contains("\"data\": true"), "{map}");
            let copy = dir.path().join("copy");
            let copy = copy.to_str().unwrap();
            tool(&core, "qemu-img", &["convert", "-O", "raw", "-f", "raw", &uri, copy]).await;
            assert!(std::fs::read(copy).unwrap() == data);
        }
    });
}

#[test]
fn qemu_io_writes_zeroes_discards_and_verifies() {
    if !installed(&["qemu-io"]) {
        return;
    }
    on_core(async |core| {
        let dir = TempDir::new().unwrap();
        let site = site(&core, &dir, 64 * MIB, 512).await;
        let script = [
            "write -P 0xa5 0 1M",
            "write -f -P 0x5a 1M 64k",
            "write -z -u 64k 64k",
            "write -z 256k 4k",
            "discard 512k 64k",
            "flush",
            "aio_write -P 0x11 8M 2M",
            "aio_write -P 0x22 10M 2M",
            "aio_write -P 0x33 9M 2M",
            "aio_flush",
            "read -P 0xa5 0 64k",
            "read -P 0 64k 64k",
            "read -P 0 256k 4k",
            "read -P 0x5a 1M 64k",
            "read -P 0x33 9M 2M",
            // Neither aligned nor a whole block: the client reads, changes and writes.
            "write -P 0x77 5000001 777",
            "read -P 0x77 5000001 777",
        ];
        let uri = uri(&site.at, "disk");
        let mut args = vec!["-f", "raw"];
        script.iter().for_each(|line| args.extend(["-c", line]));
        args.push(&uri);
        let out = tool(&core, "qemu-io", &args).await;
        assert!(!out.contains("verification failed") && !out.contains("error"), "{out}");
    });
}

#[test]
fn nbdinfo_sees_what_there_is() {
    if !installed(&["nbdinfo"]) {
        return;
    }
    on_core(async |core| {
        let dir = TempDir::new().unwrap();
        let site = site(&core, &dir, 8 * MIB, 4096).await;
        let nbdinfo = tool(&core, "nbdinfo", &[&uri(&site.at, "disk")]).await;
        for line in [
            "protocol: newstyle-fixed without TLS, using structured packets",
            "export-size: 8388608",
            "base:allocation",
            "can_multi_conn: true",
            "can_fast_zero: true",
            "can_df: true",
            "can_cache: false",
            "is_read_only: false",
            "block_size_minimum: 4096",
        ] {
            assert!(nbdinfo.contains(line), "{line}\n{nbdinfo}");
        }
        let list = tool(&core, "nbdinfo", &["--list", "--json", &uri(&site.at, "")]).await;
        assert!(list.contains("\"export-name\": \"disk\""), "{list}");
        let refused = outcome(&core, "nbdinfo", &[&uri(&site.at, "other")]).await;
        assert!(!refused.status.success());
        // No TLS: one that insists on it is told so, and goes.
        let tls = format!("nbds+unix:///disk?socket={}", path_of(&site.at).display());
        assert!(!outcome(&core, "nbdinfo", &[&tls]).await.status.success());
        assert!(tool(&core, "nbdinfo", &["--size", &uri(&site.at, "")]).await.trim() == "8388608");
    });
}

#[test]
fn nbdcopy_copies_by_several_connections() {
    if !installed(&["nbdcopy"]) {
        return;
    }
    on_core(async |core| {
        let dir = TempDir::new().unwrap();
        let site = site(&core, &dir, 32 * MIB, 512).await;
        let (file, data) = image(&dir, "image", 32 * MIB);
        let (uri, copy) = (uri(&site.at, "disk"), dir.path().join("copy"));
        tool(&core, "nbdcopy", &["--connections=4", "--flush", file.to_str().unwrap(), &uri]).await;
        tool(&core, "nbdcopy", &["--connections=4", &uri, copy.to_str().unwrap()]).await;
        assert!(std::fs::read(copy).unwrap() == data);
    });
}

#[test]
fn fio_verifies_what_it_writes() {
    if !installed(&["fio"]) {
        return;
    }
    on_core(async |core| {
        let engines = tool(&core, "fio", &["--enghelp"]).await;
        if !engines.contains("nbd") {
            return skipped("this fio knows no NBD");
        }
        let dir = TempDir::new().unwrap();
        let site = site(&core, &dir, 64 * MIB, 512).await;
        let uri = format!("--uri={}", uri(&site.at, "disk"));
        let args = [
            "--name=verify",
            "--ioengine=nbd",
            &uri,
            "--rw=randwrite",
            "--bsrange=512-256k",
            "--blockalign=512",
            "--iodepth=32",
            "--size=64M",
            "--io_size=96M",
            "--verify=crc32c",
            "--verify_backlog=128",
            "--do_verify=1",
            "--verify_state_save=0",
            "--norandommap=0",
            "--fsync=64",
        ];
        let out = tool(&core, "fio", &args).await;
        assert!(out.contains("err= 0"), "{out}");
        assert!(site.dev.stats().flushes > 0);
    });
}

/// A program that serves until this is dropped.
struct Serves(std::process::Child);

impl Drop for Serves {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a server, and waits for its socket.
async fn serve(socket: &Path, program: &str, args: &[&str]) -> Serves {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null());
    let mut server = Serves(command.spawn().unwrap());
    let until = Instant::now() + Duration::from_secs(20);
    while !socket.exists() {
        assert!(Instant::now() < until, "{program} does not listen");
        assert_eq!(server.0.try_wait().unwrap(), None, "{program} has ended");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    server
}

/// A disk of another project's server, made anew each time.
struct Foreign<F: Fn(&Path, &Path) -> (String, Vec<String>)> {
    core: Core,
    pool: BufferPool,
    dir: TempDir,
    connections: u16,
    servers: std::cell::RefCell<Vec<Serves>>,
    /// The program that serves a file at a socket.
    program: F,
}

impl<F: Fn(&Path, &Path) -> (String, Vec<String>)> Foreign<F> {
    fn new(core: Core, connections: u16, program: F) -> Self {
        let (pool, dir) = (BufferPool::new(MIN_POOL).unwrap(), TempDir::new().unwrap());
        Self { core, pool, dir, connections, servers: Default::default(), program }
    }
}

impl<F: Fn(&Path, &Path) -> (String, Vec<String>)> Subject for Foreign<F> {
    fn pool(&self) -> BufferPool {
        self.pool.clone()
    }

    async fn fresh(&self) -> Dev {
        let number = self.servers.borrow().len();
        let (file, socket) = (
            self.dir.path().join(format!("{number}")),
            self.dir.path().join(format!("{number}.s")),
        );
        std::fs::File::create(&file).unwrap().set_len(2 * MIN_BYTES).unwrap();
        let (program, args) = (self.program)(&file, &socket);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let server = serve(&socket, &program, &args).await;
        self.servers.borrow_mut().push(server);
        let options = Options { connections: self.connections, ..Options::new("") };
        // The socket is there before it is listened at.
        for _ in 0..200 {
            match Disk::connect(&self.core, &Address::Unix(socket.clone()), &options).await {
                Ok(disk) => return Dev::shared(disk),
                Err(initiator::nbd::ConnectError::Dial(_)) => {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                Err(other) => panic!("{other}"),
            }
        }
        panic!("{program} does not listen");
    }

    async fn grow(&self) -> bool {
        false
    }

    async fn space_used(&self) -> Option<u64> {
        None
    }

    async fn cut_power(&self, _seed: u64) -> Option<Dev> {
        None
    }

    async fn fail_next(&self, _kind: OpKind, _error: Error) -> bool {
        false
    }
}

fn strings(args: &[&str], paths: &[&Path]) -> Vec<String> {
    let mut paths = paths.iter();
    let mut put = |arg: &&str| match arg.strip_suffix('%') {
        Some(prefix) => format!("{prefix}{}", paths.next().unwrap().display()),
        None => (*arg).to_owned(),
    };
    args.iter().map(&mut put).collect()
}

#[test]
fn a_disk_of_qemu_nbd_conforms() {
    if !installed(&["qemu-nbd"]) {
        return;
    }
    on_core(async |core| {
        let subject = Foreign::new(core, 1, |file, socket| {
            let args = ["-t", "-f", "raw", "--discard=unmap", "-k", "%", "%"];
            ("qemu-nbd".to_owned(), strings(&args, &[socket, file]))
        });
        conformance::check(&subject, 1).await;
    });
}

#[test]
fn a_disk_of_nbdkit_conforms() {
    if !installed(&["nbdkit"]) {
        return;
    }
    on_core(async |core| {
        let subject = Foreign::new(core, 4, |file, socket| {
            let args = ["-f", "--exit-with-parent", "-U", "%", "file", "file=%"];
            ("nbdkit".to_owned(), strings(&args, &[socket, file]))
        });
        let dev = subject.fresh().await;
        assert_eq!(dev.info().block_size, 512);
        conformance::check(&subject, 2).await;
    });
}

/// A server that has as little as can be: simple replies, no zeroing, no FUA, one connection.
#[test]
fn a_disk_of_a_server_that_knows_little_conforms() {
    if !installed(&["nbdkit"]) {
        return;
    }
    on_core(async |core| {
        let subject = Foreign::new(core, 1, |file, socket| {
            let args = [
                "-f",
                "--exit-with-parent",
                "--no-sr",
                "--filter=nozero",
                "--filter=fua",
                "-U",
                "%",
                "file",
                "file=%",
                "zeromode=none",
            ];
            ("nbdkit".to_owned(), strings(&args, &[socket, file]))
        });
        let dev = subject.fresh().await;
        assert!(!dev.info().native_fua && dev.info().volatile_cache);
        conformance::check(&subject, 3).await;
    });
}

/// A server that is killed under load: what is asked afterwards fails, at once and for ever.
#[test]
fn a_server_that_dies_loses_its_disk() {
    if !installed(&["nbdkit"]) {
        return;
    }
    on_core(async |core| {
        let dir = TempDir::new().unwrap();
        let socket = dir.path().join("s");
        let args = ["-f", "--filter=delay", "-U", "%", "memory", "64M", "wdelay=300ms"];
        let args = strings(&args, &[&socket]);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let server = serve(&socket, "nbdkit", &args).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        let at = Address::Unix(socket.clone());
        let disk = Disk::connect(&core, &at, &Options::new("")).await.unwrap();
        let client =
            Rc::new(TestClient::new(&Dev::shared(disk), &BufferPool::new(1 << 20).unwrap()));
        client.read(0, 8).await.unwrap();
        let writer = Rc::clone(&client);
        let write =
            tokio::task::spawn_local(async move { writer.write(0, &[1; 512], false).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(server);
        assert_eq!(write.await.unwrap(), Err(Error::Gone));
        assert_eq!(client.read(0, 1).await.map(drop), Err(Error::Gone));
        assert_eq!(client.flush().await, Err(Error::Gone));
    });
}
