//! `./run demo`: the product's main job from beginning to end, on real input and with other people's clients.

use crate::{
    guest::{self, Kernel, Order},
    house::House,
    install,
    node::{Exported, Node, Profile, Wishes},
    tier::{iscsi_variables, nvme_variables},
};
use anyhow::{Context, Result, ensure};
use probe::registers::Dice;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// The tree: its files, and at least how many bytes they have together.
const FILES: usize = 1500;
const TREE_BYTES: u64 = 200_000_000;
const IMAGE: &str = "400M";
const LIMIT: Duration = Duration::from_secs(180);

/// What must be installed for the demo.
pub(crate) fn packages() -> Vec<&'static [install::Package]> {
    let mut packages = guest::packages();
    packages.extend([install::QEMU_IMG, install::NETWORK]);
    packages
}

/// Everything between the build and the closing words.
pub(crate) fn show(house: &House, profile: Profile) -> Result<()> {
    let mut stage = Stage { house, directory: house.directory("demo")?, node: None, volume: None };
    stage.image()?;
    stage.serve(profile)?;
    stage.copy_in()?;
    stage.guest()?;
    stage.end()
}

/// How to do the same by hand.
pub(crate) fn closing_words(house: &House) {
    let program = Profile::Release.program(house);
    let program = program.strip_prefix(&house.root).unwrap_or(&program).display();
    println!(
        "
To serve a volume yourself (as root, or with `data_dir` and `api.socket` in a configuration file):
    {program} node &
    {program} volume create mine --size 10GiB --allow any
    {program} volume show mine          # names the target, the subsystem and the portals

and to connect the initiator of any Linux machine to it:
    iscsiadm -m discovery -t sendtargets -p ADDRESS
    iscsiadm -m node -T TARGET -p ADDRESS --login
or
    nvme discover -t tcp -a ADDRESS -s 8009
    nvme connect -t tcp -a ADDRESS -s 4420 -n SUBSYSTEM

`--allow any` lets everybody in; `--allow iqn…` or `--allow nqn…` names who may.
"
    );
}

struct Stage<'a> {
    house: &'a House,
    directory: PathBuf,
    node: Option<Node>,
    volume: Option<Exported>,
}

impl Stage<'_> {
    fn image_file(&self) -> PathBuf {
        self.directory.join("tree.ext4")
    }

    fn volume(&self) -> Result<&Exported> {
        self.volume.as_ref().context("no volume yet")
    }

    fn step(&self, what: &str, body: impl FnOnce() -> Result<()>) -> Result<()> {
        ensure!(self.house.check(what, body), "the demo ends here");
        Ok(())
    }

    fn tool(&self, program: &str, arguments: &[&str]) -> Result<()> {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(&self.directory);
        self.house.run(program, &mut command, LIMIT)?.ok()?;
        Ok(())
    }

    /// A directory tree, the checksums of its files, an ext4 image of it.
    fn image(&self) -> Result<()> {
        self.step(
            &format!("a directory tree: {FILES} files, {} MB", TREE_BYTES / 1_000_000),
            || {
                let written = plant(&self.directory.join("tree"))?;
                ensure!(written >= TREE_BYTES, "the tree has only {written} bytes");
                let sums =
                    "cd tree && find . -type f -print0 | sort -z | xargs -0 sha256sum > ../sums";
                self.tool("sh", &["-c", sums])
            },
        )?;
        self.step("an ext4 image of it", || {
            self.tool("mke2fs", &["-q", "-t", "ext4", "-d", "tree", "tree.ext4", IMAGE])?;
            fs::remove_dir_all(self.directory.join("tree")).context("cannot remove the tree")
        })
    }

    fn serve(&mut self, profile: Profile) -> Result<()> {
        let wishes = Wishes { profile, ..Wishes::default() };
        let mut node = Node::new(self.house, &self.directory, "node", &wishes)?;
        self.step("a node with its disks in files", || node.start())?;
        let mut volume = None;
        self.step("a volume of the image's size, for iSCSI and NVMe/TCP at once", || {
            let bytes = fs::metadata(self.image_file()).context("no image")?.len();
            volume = Some(node.create("demo", &bytes.to_string())?);
            Ok(())
        })?;
        self.node = Some(node);
        self.volume = volume;
        Ok(())
    }

    fn copy_in(&self) -> Result<()> {
        let url = self.volume()?.unit.qemu_url();
        self.step("the image copied in over iSCSI (qemu-img convert)", || {
            self.tool("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", "tree.ext4", &url])
        })?;
        self.step("volume and image are identical (qemu-img compare)", || {
            self.tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", "tree.ext4", &url])
        })
    }

    fn guest(&self) -> Result<()> {
        let kernel = Kernel::choose(self.house)?;
        let volume = self.volume()?;
        let mut variables = iscsi_variables(&volume.unit);
        variables.extend(nvme_variables(&volume.subsystem, guest::host_address()));
        variables.push(("SUMS", "sums".to_owned()));
        variables.push(("FILES", FILES.to_string()));
        let sums = self.directory.join("sums");
        let files = vec![("sums", sums.as_path())];
        self.house
            .display
            .line(&format!("  a guest ({}) with Linux's own initiators:", kernel.name()));
        self.house.display.working(&format!("a guest on {}", kernel.name()));
        let order = Order { script: "tree.sh", variables, files, memory_mib: 768, limit: LIMIT };
        ensure!(guest::run(self.house, &kernel, &order)?, "the guest found faults");
        Ok(())
    }

    fn end(mut self) -> Result<()> {
        let Some(mut node) = self.node.take() else { return Ok(()) };
        self.step("the node ends in order", || {
            let status = node.stop()?;
            ensure!(status.success(), "the node ended with {status}");
            Ok(())
        })
    }
}

/// Writes the tree, the same on every machine; returns its bytes.
fn plant(root: &Path) -> Result<u64> {
    let mut dice = Dice::new(2026);
    let mut written = 0;
    for number in 0..FILES {
        let directory = root.join(format!("d{}/e{}", dice.below(12), dice.below(8)));
        fs::create_dir_all(&directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
        let content = content(&mut dice, number);
        written += content.len() as u64;
        let path = directory.join(format!("file {number}"));
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(written)
}

/// Small, large and empty files; bytes that compress and bytes that do not.
fn content(dice: &mut Dice, number: usize) -> Vec<u8> {
    let mean = 2 * TREE_BYTES / FILES as u64;
    let length = match number % 50 {
        0 => 0,
        1..=9 => dice.below(4096),
        _ => dice.below(mean) + mean / 5,
    };
    let length = usize::try_from(length).unwrap_or(0);
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        let word = dice.roll();
        let word = if number.is_multiple_of(3) {
            word & 0x0707_0707_0707_0707 | 0x6060_6060_6060_6060
        } else {
            word
        };
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_large_enough_and_fits_the_image() {
        let mut dice = Dice::new(2026);
        let bytes: u64 = (0..FILES)
            .map(|number| {
                dice.below(12);
                dice.below(8);
                content(&mut dice, number).len() as u64
            })
            .sum();
        assert!((TREE_BYTES..350_000_000).contains(&bytes), "{bytes}");
    }
}
