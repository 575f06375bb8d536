//! What an idle core costs, and what a polling one does. The only test in its process, because
//! it looks at the processor time of all cores there are.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::{MIB, config, cores_cpu, cores_sleeps, pattern};
use rt::disk::OpenOptions;
use rt::{Core, Cores, CoresConfig};
use testkit::{TestDir, wait};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::sleep;

/// Gives a core an open disk that was used, and a connection that was.
async fn live(core: Core, dir: std::path::PathBuf) {
    let how = OpenOptions::new().create(MIB as u64);
    let disk = core.open_disk(&dir.join(core.id().to_string()), how).await.unwrap();
    disk.write(0, pattern(&core.buffer_pool().account(), 1, 4096).await).await.unwrap();
    let listener = core.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let mut client = core.dial(listener.local_addr().unwrap()).await.unwrap();
    let (mut server, _) = listener.accept().await.unwrap();
    tokio::task::spawn_local(async move {
        while let Ok(byte) = server.read_u8().await {
            server.write_u8(byte).await.unwrap();
        }
        drop((disk, listener));
    });
    client.write_u8(7).await.unwrap();
    assert_eq!(client.read_u8().await.unwrap(), 7);
    tokio::task::spawn_local(async move { client.read_u8().await });
}

#[test]
fn an_idle_core_sleeps_and_a_polling_one_does_not() {
    let dir = TestDir::on_disk();
    let cores = Cores::start(&config(2)).unwrap();
    wait(async {
        for core in cores.handles() {
            let dir = dir.file("");
            core.run(move |core| live(core, dir)).await.unwrap();
        }
        sleep(Duration::from_millis(200)).await;
        let before = cores_cpu();
        let slept = cores_sleeps();
        assert!(before > Duration::ZERO && slept > 0, "the cores' threads were found");
        sleep(Duration::from_secs(1)).await;
        let used = cores_cpu() - before;
        assert_eq!(cores_sleeps() - slept, 0, "nothing wakes an idle core");
        assert!(used < Duration::from_millis(2), "two idle cores used {used:?} in a second");
    });
    cores.stop_now();

    let poll_window = Duration::from_millis(300);
    let cores = Cores::start(&CoresConfig { poll_window, ..config(1) }).unwrap();
    wait(async {
        let core = &cores.handles()[0];
        sleep(Duration::from_millis(500)).await;
        let before = cores_cpu();
        core.run(|_| async {}).await.unwrap();
        sleep(Duration::from_millis(600)).await;
        let after_activity = cores_cpu() - before;
        assert!(after_activity > Duration::from_millis(30), "polled only {after_activity:?}");
        let before = cores_cpu();
        sleep(Duration::from_millis(300)).await;
        let later = cores_cpu() - before;
        assert!(later < Duration::from_millis(2), "{later:?} after the window");
    });
    cores.stop_now();
}
