//! `iscsi_unit ADDRESS TARGET`: uses unit 1 of a foreign target as a disk, destroying its contents:
//! all layer operations under the register checker, with and without digests, over sessions that
//! end and reconnect. For checks against other targets than ours.
#![allow(clippy::unwrap_used)]

use std::cell::RefCell;
use std::error::Error;
use std::net::SocketAddr;
use std::rc::Rc;

use block::testing::TestClient;
use block::testing::register::{Checker, InitialContents};
use block::testing::workload::Workload;
use block::{Blocks, BufferPool, Dev, Lba};
use initiator::iscsi::{CompareError, Lun, Options, Session, Staging, discover};
use iscsi::Digests;
use iscsi::params::Limits;
use rt::{Core, Cores, CoresConfig};

const INITIATOR: &str = "iqn.2026-01.io.windrose:check";

/// Blocks that the workload uses, and operations in one round of it.
const BLOCKS: u64 = 4096;
const OPERATIONS: usize = 2000;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(address), Some(target)) = (arguments.next(), arguments.next()) else {
        return Err("iscsi_unit ADDRESS TARGET".into());
    };
    let address: SocketAddr = address.parse()?;
    let config = CoresConfig { cpus: vec![None], ..CoresConfig::default() };
    let cores = Cores::start(&config)?;
    let wait = tokio::runtime::Builder::new_current_thread().build()?;
    let run =
        cores.handles()[0].run(move |core| async move { check(&core, address, &target).await });
    let result = wait.block_on(run);
    cores.stop_now();
    result.map_err(|_| "it has panicked, see above")?.map_err(Into::into)
}

async fn check(core: &Core, address: SocketAddr, target: &str) -> Result<(), String> {
    let options = Options::new(address, target, INITIATOR);
    let found = discover(core, options.clone(), Staging::default()).await;
    let found = found.map_err(|e| format!("discovery: {e}"))?;
    if !found.iter().any(|f| f.name == target) {
        return Err(format!("discovery does not tell of {target}: {found:?}"));
    }
    let mut seed = 1;
    for digests in [false, true] {
        for eager in [true, false] {
            let digests = Digests { header: digests, data: digests };
            let limits = Limits { initial_r2t: !eager, immediate_data: eager, ..Limits::default() };
            let options = Options { digests, limits, ..options.clone() };
            round(core, options, seed).await?;
            println!("digests {}, unsolicited data {eager}: as it should be", digests.data);
            seed += 1;
        }
    }
    Ok(())
}

/// One session: a workload under the checker, and commands beyond the layer.
async fn round(core: &Core, options: Options, seed: u64) -> Result<(), String> {
    let session = Session::connect(core, options, Staging::default()).await;
    let session = session.map_err(|e| format!("login: {e}"))?;
    let units = session.luns().await.map_err(|e| format!("list of units: {e}"))?;
    if !units.contains(&1) {
        return Err(format!("there is no unit 1, but {units:?}"));
    }
    let lun = Lun::open(&session, 1).await.map_err(|e| format!("unit 1: {e}"))?;
    if seed == 1 {
        println!("{:?}", lun.described());
    }
    let dev = Dev::shared(Rc::clone(&lun));
    let client = TestClient::new(&dev, &BufferPool::new(64 << 20).map_err(|e| e.to_string())?);
    let block_size = dev.info().block_size;
    client.zero(0, u32::try_from(BLOCKS).unwrap(), true).await.map_err(|e| format!("zero: {e}"))?;
    let checker = RefCell::new(Checker::new(seed, block_size, InitialContents::Zeroes));
    let workload = Workload::new(client.clone(), Blocks::new(Lba(0), BLOCKS), 16, seed);
    workload.run(&checker, OPERATIONS).await.map_err(|e| format!("{e:?}"))?;
    let errors = workload.take_errors();
    if !errors.is_empty() {
        return Err(format!("the unit has failed {} times: {:?}", errors.len(), errors[0]));
    }
    workload.audit(&checker).await.map_err(|e| format!("{e:?}"))?;
    swap(&lun, &client).await?;
    session.shut_down().await.map_err(|e| format!("logout: {e}"))
}

/// COMPARE AND WRITE, if the unit supports it.
async fn swap(lun: &Lun, client: &TestClient) -> Result<(), String> {
    let size = lun.described().attributes.info.block_size as usize;
    let at = Lba(BLOCKS + 8);
    client.write(at.0, &vec![1; size], true).await.map_err(|e| e.to_string())?;
    let ctx = client.ctx(4 * size).await;
    let [old, new] = [1, 2].map(|byte| rt::buf::copy_in(ctx.credit(), &vec![byte; size]));
    match lun.compare_and_write(at, (&old, &new), true, &ctx).await {
        Ok(()) => {}
        Err(CompareError::Unsupported) => return Ok(()),
        Err(e) => return Err(format!("compare and write: {e}")),
    }
    let again = lun.compare_and_write(at, (&old, &new), true, &ctx).await;
    if again != Err(CompareError::Miscompare) {
        return Err(format!("a compare and write of other contents: {again:?}"));
    }
    Ok(())
}
