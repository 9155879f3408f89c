//! The environment that torch's workers expect of their launcher, and what the heartbeat client reads.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mainstay_model::id::Attempt;
use mainstay_wire::nvrx::socket_name;

use super::devices;
use super::round_server::{DRILL_SOCKET, SOCKET};
use super::spec::{RankFiles, RankSpec};

/// The step that a rank of a job on several hosts loads.
const RESUME: &str = "MAINSTAY_CHECKPOINT_RESUME";

pub(super) type Variables = Vec<(&'static str, String)>;

impl RankSpec {
    /// The variables of a rank that each round changes.
    fn round_variables(&self, attempt: Attempt, local_rank: u32, master_port: u16) -> Variables {
        let (seat, settings) = (&self.seat, &self.settings);
        let rank = self.rank(local_rank).0.to_string();
        let own = if settings.virtual_local_rank { 0 } else { local_rank };
        let previous_size = match attempt.0 {
            0 => self.previous_size,
            _ => Some(self.ran_before.unwrap_or(seat.world_size)),
        };
        let variables = [
            ("RANK", rank.clone()),
            ("LOCAL_RANK", own.to_string()),
            ("WORLD_SIZE", seat.world_size.to_string()),
            ("LOCAL_WORLD_SIZE", settings.local_world_size.to_string()),
            ("GROUP_RANK", seat.group_rank.to_string()),
            ("GROUP_WORLD_SIZE", seat.group_world_size.to_string()),
            ("ROLE_RANK", rank),
            ("ROLE_WORLD_SIZE", seat.world_size.to_string()),
            ("MASTER_ADDR", self.master_addr.clone()),
            ("MASTER_PORT", master_port.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", attempt.0.to_string()),
            ("MAINSTAY_ATTEMPT", attempt.0.to_string()),
        ];
        let previous_size = previous_size.map(|size| ("MAINSTAY_PREVIOUS_WORLD_SIZE", size.to_string()));
        variables.into_iter().chain(previous_size).collect()
    }

    /// The environment of the next attempt for a rank that continues in its process.
    pub(super) fn round_environment(
        &self,
        attempt: Attempt,
        local_rank: u32,
        master_port: u16,
    ) -> BTreeMap<String, String> {
        // With several hosts. Empty if ranks find the step themselves: the previous round may have had one.
        let resume = self.resume.get(&self.rank(local_rank).0).cloned().unwrap_or_default();
        let resume = self.launcher.as_ref().map(|_| (RESUME, resume));
        let variables = self.round_variables(attempt, local_rank, master_port).into_iter().chain(resume);
        variables.map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// The variables of a rank, in addition to the launcher's own. Tunables that the user has set are kept.
    pub(super) fn environment(
        &self,
        attempt: Attempt,
        local_rank: u32,
        master_port: u16,
        files: &RankFiles,
        page: Option<&Path>,
    ) -> Variables {
        // Created before the ranks, if possible.
        let socket = |name: &str| {
            let path = self.page_dir.as_ref().map(|directory| directory.join(name));
            path.filter(|socket| socket.exists())
        };
        // In the log directory: a rank must not wait for one that does not answer.
        let modules_file = self.modules_file.clone().filter(|_| local_rank == 0 && self.logs_aside.is_none());
        let paths: [(&str, Option<PathBuf>); 9] = [
            ("TORCHELASTIC_ERROR_FILE", Some(files.error.clone())),
            ("MAINSTAY_STACKS", Some(files.stacks.clone())),
            ("MAINSTAY_CHECKPOINT_DIR", Some(self.checkpoint_dir.clone())),
            ("MAINSTAY_PAGE", page.map(Path::to_owned)),
            ("MAINSTAY_CHECKPOINT_POOL", self.checkpoint_pool.clone()),
            ("MAINSTAY_ROUNDS", socket(SOCKET)),
            ("MAINSTAY_DRILL", socket(DRILL_SOCKET)),
            ("FT_RANK_MONITOR_IPC_SOCKET", socket(&socket_name(local_rank))),
            ("MAINSTAY_MODULES", modules_file),
        ];
        let mut variables = self.round_variables(attempt, local_rank, master_port);
        variables.extend(self.common_environment());
        variables.extend([
            ("ROLE_NAME", self.settings.role.clone()),
            ("TORCHELASTIC_MAX_RESTARTS", self.max_restarts.to_string()),
            ("TORCHELASTIC_RUN_ID", self.settings.run_id.clone()),
            // Rank 0 creates a new store for each attempt, so no rank reads what an earlier generation wrote.
            ("TORCHELASTIC_USE_AGENT_STORE", "False".to_owned()),
        ]);
        let paths = paths.into_iter().filter_map(|(name, path)| Some((name, path?.display().to_string())));
        variables.extend(paths);
        variables.extend(self.resume.get(&self.rank(local_rank).0).map(|resume| (RESUME, resume.clone())));
        let devices = match self.settings.virtual_local_rank {
            true => Some(self.own_device(local_rank)),
            false => self.devices.as_ref().map(|devices| devices.join(",")),
        };
        variables.extend(devices.map(|devices| (devices::VARIABLE, devices)));
        if let Some(page) = page {
            flight_recorder(page, &files.stacks, &mut variables);
        }
        variables
    }

    /// The variables that all ranks have in common and that imports look at, for a template.
    pub(super) fn common_environment(&self) -> Variables {
        let mut variables = tunables(self.settings.local_world_size, is_set);
        // These identify the remaining processes of a job and of a launch, also if another process started them.
        variables.push(("MAINSTAY_JOB_ID", self.job.clone()));
        variables.push(("MAINSTAY_LAUNCH", self.launch.clone()));
        variables.extend(self.launcher.clone().map(|launcher| ("MAINSTAY_LAUNCHER", launcher)));
        variables
    }
}

/// With these, ranks that use NCCL write their flight record when a process writes into their pipe, and go on. The pipe is
/// next to the page, where no program copies or reads whole directories.
fn flight_recorder(page: &Path, stacks: &Path, variables: &mut Variables) {
    if !is_set("TORCH_NCCL_DEBUG_INFO_PIPE_FILE") {
        let stem = page.with_file_name("flight-").display().to_string();
        variables.push(("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", stem));
    }
    if !is_set("TORCH_NCCL_DEBUG_INFO_TEMP_FILE") && !is_set("TORCH_FR_DUMP_TEMP_FILE") {
        let stem = stacks.with_file_name("flight-record-").display().to_string();
        variables.push(("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", stem));
    }
}

/// Variables that a user may override; the same for all ranks of a job.
fn tunables(local_world_size: u32, inherited: impl Fn(&str) -> bool) -> Variables {
    let all = [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        // Records what each collective is and whether it is complete. By default torch does so for NCCL only.
        ("TORCH_FR_BUFFER_SIZE", "2000"),
        // Output goes to files, for which Python buffers blocks: a killed rank's last lines would be lost.
        ("PYTHONUNBUFFERED", "1"),
        ("OMP_NUM_THREADS", "1"),
    ];
    let is_wanted = |name: &str| !inherited(name) && (local_world_size > 1 || name != "OMP_NUM_THREADS");
    let wanted = all.into_iter().filter(|(name, _)| is_wanted(name));
    wanted.map(|(name, value)| (name, value.to_owned())).collect()
}

/// Whether the user has set a variable.
fn is_set(name: &str) -> bool {
    std::env::var_os(name).is_some()
}

/// Replaces torchrun's argument macro `${local_rank}`.
pub(super) fn expand(argument: &str, local_rank: u32) -> String {
    argument.replace("${local_rank}", &local_rank.to_string())
}

#[cfg(test)]
mod tests {
    use mainstay_recovery::protocol::Seat;

    use super::*;
    use crate::settings::RankSettings;

    fn spec() -> RankSpec {
        RankSpec {
            settings: RankSettings {
                run_id: "r".to_owned(),
                command: Vec::new(),
                local_world_size: 2,
                role: "default".to_owned(),
                virtual_local_rank: false,
                numa: None,
                progress: None,
            },
            job: "j".to_owned(),
            launch: "r@1".to_owned(),
            launcher: None,
            seat: Seat { group_rank: 0, group_world_size: 1, first_rank: 0, world_size: 2 },
            previous_size: None,
            ran_before: None,
            master_addr: "127.0.0.1".to_owned(),
            max_restarts: 3,
            run_dir: "/l".into(),
            published_dir: "/l".into(),
            logs_aside: None,
            checkpoint_dir: "/c".into(),
            checkpoint_pool: None,
            resume: BTreeMap::new(),
            page_dir: None,
            boot_id: [0; 16],
            cgroup_procs: None,
            modules_file: None,
            devices: None,
        }
    }

    fn value(spec: &RankSpec, name: &str) -> Option<String> {
        let variables = spec.environment(Attempt(2), 1, 1234, &spec.files(Attempt(2), 1), None);
        variables.into_iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    #[test]
    fn what_the_user_has_set_of_the_tunables_stays() {
        let has_threads = |ranks, set: &[&str]| {
            let variables = tunables(ranks, |name| set.contains(&name));
            variables.contains(&("OMP_NUM_THREADS", "1".to_owned()))
        };
        assert!(has_threads(2, &[]));
        assert!(!has_threads(2, &["OMP_NUM_THREADS"]));
        assert!(!has_threads(1, &[]));
        assert_eq!(value(&spec(), "RANK").as_deref(), Some("1"));
    }

    #[test]
    fn a_rank_that_goes_on_gets_the_variables_that_a_round_changes() {
        let variables = spec().round_environment(Attempt(2), 1, 1234);
        assert_eq!(variables.len(), 13, "{variables:?}");
        assert_eq!(variables["TORCHELASTIC_RESTART_COUNT"], "2");
        assert_eq!(variables["MAINSTAY_PREVIOUS_WORLD_SIZE"], "2");
        assert!(!variables.contains_key("TORCHELASTIC_ERROR_FILE"));
    }

    #[test]
    fn a_rank_that_sees_only_its_own_gpu_has_local_rank_0() {
        let mut own = RankSpec { devices: Some(vec!["GPU-6".to_owned(), "GPU-7".to_owned()]), ..spec() };
        own.settings.virtual_local_rank = true;
        assert_eq!(value(&own, "LOCAL_RANK").as_deref(), Some("0"));
        assert_eq!(value(&own, "RANK").as_deref(), Some("1"));
        assert_eq!(value(&own, "CUDA_VISIBLE_DEVICES").as_deref(), Some("GPU-7"));
        assert_eq!(own.round_environment(Attempt(2), 1, 1234)["LOCAL_RANK"], "0");
    }

    #[test]
    fn without_a_page_there_is_no_variable_for_one() {
        assert_eq!(value(&spec(), "MAINSTAY_PAGE"), None);
    }
}
