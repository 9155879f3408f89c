//! Which CPUs are close to a rank: NUMA nodes, sockets, cores and caches, as `/sys` describes them.
//!
//! A rank belongs to the NUMA node of its GPU: the visible GPU with the rank's index. On a host without GPUs the
//! ranks are spread over the nodes in equal blocks.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::affinity;

/// Larger CPU numbers are ignored: the kernel supports 8192.
const MOST_CPUS: usize = 1 << 16;

/// NVIDIA's PCI vendor id, as `/sys` writes it.
const NVIDIA: &str = "0x10de";

/// The CPUs that a rank is bound to. The modes are torchrun's (`torch/numa/binding.py`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// All CPUs of its NUMA node.
    Node,
    /// All CPUs of the socket that its NUMA node belongs to.
    Socket,
    /// A share of the cores of its NUMA node that no other rank has.
    Exclusive,
    /// The cores of its NUMA node that share one last-level cache.
    CoreComplex,
}

/// The topology of the host as a job sees it.
#[derive(Clone, Debug)]
pub struct Topology {
    sys: PathBuf,
    /// `/proc/driver/nvidia/gpus`: one directory for each GPU, named by its PCI address.
    driver: PathBuf,
    allowed: BTreeSet<usize>,
}

impl Topology {
    /// This host, and the CPUs that this thread may run on.
    pub fn of_this_host() -> Topology {
        let allowed = affinity::allowed().into_iter().collect();
        Topology { sys: "/sys".into(), driver: "/proc/driver/nvidia/gpus".into(), allowed }
    }

    /// The CPUs of one rank of `ranks`, in ascending order. `gpus` are the visible GPUs as `CUDA_VISIBLE_DEVICES`
    /// names them.
    ///
    /// # Errors
    /// Why there are none, in words for a person.
    pub fn cpus(
        &self,
        binding: Binding,
        local_rank: u32,
        ranks: u32,
        gpus: &[String],
    ) -> Result<Vec<usize>, String> {
        let homes = if gpus.is_empty() { self.spread(ranks)? } else { self.of_gpus(gpus)? };
        let place = local_rank as usize;
        let home = *homes.get(place).ok_or_else(|| {
            format!("local rank {local_rank} has no GPU of its own: {} are visible", homes.len())
        })?;
        let sharing = homes.iter().filter(|node| **node == home).count();
        let position = homes[..place].iter().filter(|node| **node == home).count();
        let cpus = match binding {
            Binding::Node => self.of_node(home)?,
            Binding::Socket => self.of_socket(home)?,
            Binding::Exclusive => self.share(home, position, sharing)?,
            Binding::CoreComplex => self.complex(home, position)?,
        };
        Ok(cpus.into_iter().collect())
    }

    /// The node of each rank if there are no GPUs.
    fn spread(&self, ranks: u32) -> Result<Vec<usize>, String> {
        let mut usable = Vec::new();
        for node in self.nodes()? {
            // A node may have only memory, or CPUs that this process may not use.
            if self.of_node(node).is_ok() {
                usable.push(node);
            }
        }
        if usable.is_empty() {
            return Err("no NUMA node has a CPU that this process may use".to_owned());
        }
        let ranks = ranks as usize;
        Ok((0..ranks).map(|rank| usable[rank * usable.len() / ranks]).collect())
    }

    /// The node of each visible GPU.
    fn of_gpus(&self, gpus: &[String]) -> Result<Vec<usize>, String> {
        let addresses = self.addresses();
        gpus.iter().map(|gpu| self.of_gpu(&addresses, gpu)).collect()
    }

    fn of_gpu(&self, addresses: &[String], gpu: &str) -> Result<usize, String> {
        let address = match gpu.parse::<usize>() {
            Ok(number) => addresses.get(number),
            Err(_) => addresses.iter().find(|address| self.has_uuid(address, gpu)),
        };
        let address = address.ok_or_else(|| format!("the PCI address of GPU {gpu} is unknown"))?;
        let text = self.read(&format!("bus/pci/devices/{address}/numa_node"))?;
        // A host with one node often has -1 here.
        Ok(text.trim().parse::<usize>().unwrap_or(0))
    }

    /// The PCI addresses of the GPUs in ascending order, which is CUDA's order for GPUs of one kind.
    fn addresses(&self) -> Vec<String> {
        let mut found = names(&self.driver);
        if found.is_empty() {
            found = names(&self.sys.join("bus/pci/devices"));
            found.retain(|address| {
                let is =
                    |file: &str| self.read(&format!("bus/pci/devices/{address}/{file}")).unwrap_or_default();
                is("vendor").trim() == NVIDIA && is("class").starts_with("0x03")
            });
        }
        found.sort();
        found
    }

    fn has_uuid(&self, address: &str, uuid: &str) -> bool {
        let text = std::fs::read_to_string(self.driver.join(address).join("information")).unwrap_or_default();
        let of_line = |line: &str| {
            line.strip_prefix("GPU UUID:").is_some_and(|reported| reported.trim().starts_with(uuid))
        };
        // CUDA accepts an abbreviated UUID.
        uuid.starts_with("GPU-") && text.lines().any(of_line)
    }

    fn nodes(&self) -> Result<Vec<usize>, String> {
        if !self.has_nodes() {
            return Ok(vec![0]);
        }
        let listed = names(&self.sys.join("devices/system/node"));
        let mut nodes: Vec<usize> =
            listed.iter().filter_map(|name| name.strip_prefix("node")?.parse().ok()).collect();
        nodes.sort_unstable();
        Ok(nodes)
    }

    /// A kernel without NUMA has no such directory; everything is one node then.
    fn has_nodes(&self) -> bool {
        self.sys.join("devices/system/node/node0").exists()
    }

    fn of_node(&self, node: usize) -> Result<BTreeSet<usize>, String> {
        let all = if self.has_nodes() {
            list(&self.read(&format!("devices/system/node/node{node}/cpulist"))?)
        } else {
            self.allowed.clone()
        };
        let usable: BTreeSet<usize> = all.intersection(&self.allowed).copied().collect();
        if usable.is_empty() {
            return Err(format!("NUMA node {node} has no CPU that this process may use"));
        }
        Ok(usable)
    }

    fn of_socket(&self, home: usize) -> Result<BTreeSet<usize>, String> {
        let socket = self.socket(home)?;
        let mut cpus = BTreeSet::new();
        for node in self.nodes()? {
            if self.socket(node).is_ok_and(|of| of == socket) {
                cpus.append(&mut self.of_node(node)?);
            }
        }
        Ok(cpus)
    }

    fn socket(&self, node: usize) -> Result<String, String> {
        let cpus = self.of_node(node)?;
        let first = cpus.first().copied().unwrap_or(0);
        let text = self.read(&format!("devices/system/cpu/cpu{first}/topology/physical_package_id"))?;
        Ok(text.trim().to_owned())
    }

    /// The cores at one of `sharing` equal parts; the first parts get the remainder.
    fn share(&self, home: usize, position: usize, sharing: usize) -> Result<BTreeSet<usize>, String> {
        let mut cores: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        for cpu in self.of_node(home)? {
            let siblings =
                list(&self.read(&format!("devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))?);
            cores.entry(siblings.first().copied().unwrap_or(cpu)).or_default().insert(cpu);
        }
        let (each, more) = (cores.len() / sharing, cores.len() % sharing);
        if each == 0 {
            return Err(format!(
                "NUMA node {home} has {} core(s) for {sharing} ranks; write node in place of exclusive",
                cores.len()
            ));
        }
        let from = position * each + position.min(more);
        let count = each + usize::from(position < more);
        Ok(cores.into_values().skip(from).take(count).flatten().collect())
    }

    /// The core complex at this position, the largest first; complexes are reused if there are more ranks.
    fn complex(&self, home: usize, position: usize) -> Result<BTreeSet<usize>, String> {
        let mut complexes: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        for cpu in self.of_node(home)? {
            let sharing = self.sharing_last_cache(cpu)?;
            complexes.entry(sharing.first().copied().unwrap_or(cpu)).or_default().insert(cpu);
        }
        let mut sorted: Vec<(usize, BTreeSet<usize>)> = complexes.into_iter().collect();
        sorted.sort_by_key(|(first, cpus)| (std::cmp::Reverse(cpus.len()), *first));
        let at = position % sorted.len().max(1);
        sorted.into_iter().nth(at).map(|(_, cpus)| cpus).ok_or_else(|| format!("NUMA node {home} has no CPU"))
    }

    fn sharing_last_cache(&self, cpu: usize) -> Result<BTreeSet<usize>, String> {
        let directory = format!("devices/system/cpu/cpu{cpu}/cache");
        let mut last = None;
        for index in names(&self.sys.join(&directory)).iter().filter(|name| name.starts_with("index")) {
            let of = |file: &str| self.read(&format!("{directory}/{index}/{file}"));
            if !matches!(of("type")?.trim(), "Unified" | "Data") {
                continue;
            }
            let level: u32 = of("level")?.trim().parse().unwrap_or(0);
            if last.as_ref().is_none_or(|(highest, _)| level > *highest) {
                last = Some((level, list(&of("shared_cpu_list")?)));
            }
        }
        last.map(|(_, cpus)| cpus)
            .ok_or_else(|| format!("{}: no cache is listed", self.sys.join(directory).display()))
    }

    fn read(&self, file: &str) -> Result<String, String> {
        let path = self.sys.join(file);
        std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// A kernel list such as `0-3,8`.
fn list(text: &str) -> BTreeSet<usize> {
    let mut cpus = BTreeSet::new();
    for part in text.trim().split(',') {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(from), Ok(to)) = (from.trim().parse::<usize>(), to.trim().parse::<usize>()) {
            cpus.extend(from..=to.min(MOST_CPUS));
        }
    }
    cpus
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sockets with two nodes each; a node has four cores of two threads each, in two complexes.
    fn host(root: &Path) -> Topology {
        let write = |file: String, text: &str| {
            let path = root.join(file);
            std::fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
            std::fs::write(path, text).expect("a file");
        };
        for node in 0..4 {
            let (first, twin) = (node * 4, 16 + node * 4);
            let cpus = format!("{first}-{},{twin}-{}\n", first + 3, twin + 3);
            write(format!("sys/devices/system/node/node{node}/cpulist"), &cpus);
            for core in first..first + 4 {
                for cpu in [core, core + 16] {
                    let of = format!("sys/devices/system/cpu/cpu{cpu}");
                    write(format!("{of}/topology/physical_package_id"), &(node / 2).to_string());
                    write(format!("{of}/topology/thread_siblings_list"), &format!("{core},{}\n", core + 16));
                    let pair = core - core % 2;
                    let shared = format!("{pair}-{},{}-{}", pair + 1, pair + 16, pair + 17);
                    for (index, kind, level, list) in
                        [(0, "Data", "1", "0"), (1, "Instruction", "4", "0-31"), (3, "Unified", "3", &shared)]
                    {
                        write(format!("{of}/cache/index{index}/type"), kind);
                        write(format!("{of}/cache/index{index}/level"), level);
                        write(format!("{of}/cache/index{index}/shared_cpu_list"), list);
                    }
                }
            }
        }
        Topology { sys: root.join("sys"), driver: root.join("gpus"), allowed: (0..32).collect() }
    }

    fn with_gpus(root: &Path) -> Topology {
        let host = host(root);
        for (address, node, uuid) in [
            ("0000:17:00.0", "1", "GPU-aa"),
            ("0000:65:00.0", "1", "GPU-bb"),
            ("0000:ca:00.0", "-1", "GPU-cc"),
        ] {
            let device = root.join("sys/bus/pci/devices").join(address);
            std::fs::create_dir_all(&device).expect("a directory");
            std::fs::write(device.join("numa_node"), node).expect("a file");
            std::fs::create_dir_all(root.join("gpus").join(address)).expect("a directory");
            let text = format!("Model:\t\t H100\nGPU UUID: \t {uuid}-0123\n");
            std::fs::write(root.join("gpus").join(address).join("information"), text).expect("a file");
        }
        host
    }

    fn gpus(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn without_gpus_the_ranks_are_spread_over_the_nodes() {
        let root = testing::tempdir().expect("a directory");
        let host = host(root.path());
        let first = |rank, ranks| host.cpus(Binding::Node, rank, ranks, &[]).expect("CPUs")[0];
        assert_eq!((0..8).map(|rank| first(rank, 8)).collect::<Vec<_>>(), [0, 0, 4, 4, 8, 8, 12, 12]);
        assert_eq!((0..2).map(|rank| first(rank, 2)).collect::<Vec<_>>(), [0, 8]);
        let socket = host.cpus(Binding::Socket, 3, 4, &[]).expect("CPUs");
        assert_eq!(socket, (8..16).chain(24..32).collect::<Vec<_>>());
    }

    #[test]
    fn a_rank_is_near_the_gpu_at_its_place() {
        let root = testing::tempdir().expect("a directory");
        let host = with_gpus(root.path());
        let node = |rank, visible: &[&str]| host.cpus(Binding::Node, rank, 2, &gpus(visible));
        assert_eq!(node(0, &["0", "2"]).expect("CPUs")[0], 4);
        assert_eq!(node(1, &["0", "2"]).expect("CPUs")[0], 0, "-1 is the only node there is");
        assert_eq!(node(0, &["GPU-bb"]).expect("CPUs")[0], 4);
        assert!(node(1, &["0"]).is_err_and(|error| error.contains("GPU")));
        assert!(node(0, &["MIG-1"]).is_err_and(|error| error.contains("PCI address of GPU MIG-1")));
    }

    #[test]
    fn exclusive_cores_are_disjoint_and_complete() {
        let root = testing::tempdir().expect("a directory");
        let host = host(root.path());
        let of = |rank| host.cpus(Binding::Exclusive, rank, 12, &[]).expect("CPUs");
        assert_eq!((of(0), of(1), of(2)), (vec![0, 1, 16, 17], vec![2, 18], vec![3, 19]));
        assert!(
            host.cpus(Binding::Exclusive, 0, 20, &[]).is_err_and(|error| error.contains("4 core(s) for 5"))
        );
    }

    #[test]
    fn core_complexes_take_turns() {
        let root = testing::tempdir().expect("a directory");
        let host = host(root.path());
        let of = |rank| host.cpus(Binding::CoreComplex, rank, 12, &[]).expect("CPUs");
        assert_eq!((of(0), of(1), of(2)), (vec![0, 1, 16, 17], vec![2, 3, 18, 19], vec![0, 1, 16, 17]));
    }

    #[test]
    fn only_cpus_that_may_be_used_are_given() {
        let root = testing::tempdir().expect("a directory");
        let host = Topology { allowed: (2..6).collect(), ..host(root.path()) };
        let of = |rank| host.cpus(Binding::Node, rank, 2, &[]).expect("CPUs");
        assert_eq!((of(0), of(1)), (vec![2, 3], vec![4, 5]));
        let bare = testing::tempdir().expect("a directory");
        let without = Topology { sys: bare.path().to_owned(), ..host.clone() };
        assert_eq!(without.cpus(Binding::Node, 1, 2, &[]), Ok(vec![2, 3, 4, 5]), "a kernel without NUMA");
    }

    #[test]
    fn lists_of_the_kernel() {
        assert_eq!(list("0-2,5\n"), BTreeSet::from([0, 1, 2, 5]));
        assert!(list("\n").is_empty() && list("3-1").is_empty());
    }
}
