//! Cores, their mailboxes and their end.

use std::time::Duration;

use rt::{Cores, CoresConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn config(cores: usize) -> CoresConfig {
    CoresConfig { cpus: vec![None; cores], pool_bytes_per_core: 4 << 20, ..Default::default() }
}

/// Waits for `future` on an ordinary thread.
fn wait<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(future)
}

#[test]
fn a_connection_moves_between_cores_with_its_unread_bytes() {
    let cores = Cores::start(&config(2)).unwrap();
    let [first, second] = cores.handles() else { panic!("two cores") };
    let second = second.clone();
    let served = first.run(|core| async move {
        let listener = core.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let at = listener.local_addr().unwrap();
        let mut client = core.dial(at).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        client.write_all(b"early").await.unwrap();
        let moved = server.detach().unwrap();
        second
            .post(move |core| async move {
                let mut server = core.attach(moved).unwrap();
                let mut got = [0; 9];
                server.read_exact(&mut got).await.unwrap();
                assert_eq!(&got, b"earlylate");
                server.write_all(&[u8::try_from(core.id()).unwrap()]).await.unwrap();
            })
            .await
            .unwrap();
        client.write_all(b"late").await.unwrap();
        client.read_u8().await.unwrap()
    });
    assert_eq!(wait(served).unwrap(), 1);
    cores.stop(|_| async { tokio::time::sleep(Duration::from_millis(1)).await });
}
