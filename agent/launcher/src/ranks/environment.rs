//! The environment that torch's workers expect of their launcher, and what the heartbeat client reads.

use std::collections::BTreeMap;
use std::path::Path;

use crate::ranks::devices;

/// The values for the environment of one rank.
#[derive(Clone, Debug)]
pub struct RankEnvironment<'a> {
    /// The job's name.
    pub job: &'a str,
    /// The run id as the user gave it (`--rdzv-id`).
    pub run_id: &'a str,
    /// This launch of the run.
    pub launch: &'a str,
    /// The launcher on this host, if the job has several.
    pub launcher: Option<&'a str>,
    /// `RANK`.
    pub rank: u32,
    /// `LOCAL_RANK`.
    pub local_rank: u32,
    /// `WORLD_SIZE`.
    pub world_size: u32,
    /// `LOCAL_WORLD_SIZE`.
    pub local_world_size: u32,
    /// `GROUP_RANK`.
    pub group_rank: u32,
    /// `GROUP_WORLD_SIZE`.
    pub group_world_size: u32,
    /// How many ranks the previous attempt had, if known.
    pub previous_size: Option<u32>,
    /// `ROLE_NAME`.
    pub role: &'a str,
    /// `MASTER_ADDR`.
    pub master_addr: &'a str,
    /// `MASTER_PORT`.
    pub master_port: u16,
    /// How often the ranks were restarted.
    pub attempt: u32,
    /// Restarts allowed.
    pub max_restarts: u32,
    /// The file for an uncaught exception.
    pub error_file: &'a Path,
    /// The file for the rank's stacks when they are requested.
    pub stacks_file: &'a Path,
    /// The rank's heartbeat page.
    pub page: Option<&'a Path>,
    /// Where NVRx's client finds its rank monitor.
    pub monitor: Option<&'a Path>,
    /// Where checkpoints go.
    pub checkpoint_dir: &'a Path,
    /// The memory that the launcher keeps for checkpoints.
    pub checkpoint_pool: Option<&'a Path>,
    /// The step from which all hosts of the job resume, and the root of the rank's shard of it.
    pub resume: Option<&'a str>,
    /// Where the client writes which modules the rank holds, if that is needed.
    pub modules_file: Option<&'a Path>,
    /// The socket on which a rank agrees on rounds with the launcher.
    pub rounds: Option<&'a Path>,
    /// The socket on which a rank receives faults to inject.
    pub drill: Option<&'a Path>,
    /// The GPUs that the rank sees (`CUDA_VISIBLE_DEVICES`), if not all that the user allows.
    pub devices: Option<String>,
    /// Whether the rank's local rank is 0 because it sees only its own GPU.
    pub virtual_local_rank: bool,
}

/// The step that a rank of a job on several hosts loads.
const RESUME: &str = "MAINSTAY_CHECKPOINT_RESUME";

/// The variables of a round: all that change for a rank that continues in its process.
const OF_A_ROUND: [&str; 13] = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "MAINSTAY_ATTEMPT",
    "MAINSTAY_PREVIOUS_WORLD_SIZE",
];

impl RankEnvironment<'_> {
    /// The variables to set. `inherited` returns whether the launcher's own environment has a variable: tunables that the
    /// user has set are kept.
    pub fn variables(&self, inherited: impl Fn(&str) -> bool) -> Vec<(&'static str, String)> {
        let mut variables = vec![
            ("RANK", self.rank.to_string()),
            ("LOCAL_RANK", if self.virtual_local_rank { 0 } else { self.local_rank }.to_string()),
            ("WORLD_SIZE", self.world_size.to_string()),
            ("LOCAL_WORLD_SIZE", self.local_world_size.to_string()),
            ("GROUP_RANK", self.group_rank.to_string()),
            ("GROUP_WORLD_SIZE", self.group_world_size.to_string()),
            ("ROLE_RANK", self.rank.to_string()),
            ("ROLE_WORLD_SIZE", self.world_size.to_string()),
            ("ROLE_NAME", self.role.to_owned()),
            ("MASTER_ADDR", self.master_addr.to_owned()),
            ("MASTER_PORT", self.master_port.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", self.attempt.to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", self.max_restarts.to_string()),
            ("TORCHELASTIC_RUN_ID", self.run_id.to_owned()),
            // Rank 0 creates a new store for each attempt, so no rank reads what an earlier generation wrote.
            ("TORCHELASTIC_USE_AGENT_STORE", "False".to_owned()),
            ("TORCHELASTIC_ERROR_FILE", self.error_file.display().to_string()),
            ("MAINSTAY_STACKS", self.stacks_file.display().to_string()),
            ("MAINSTAY_JOB_ID", self.job.to_owned()),
            ("MAINSTAY_LAUNCH", self.launch.to_owned()),
            ("MAINSTAY_ATTEMPT", self.attempt.to_string()),
            ("MAINSTAY_CHECKPOINT_DIR", self.checkpoint_dir.display().to_string()),
        ];
        if let Some(launcher) = self.launcher {
            variables.push(("MAINSTAY_LAUNCHER", launcher.to_owned()));
        }
        if let Some(size) = self.previous_size {
            variables.push(("MAINSTAY_PREVIOUS_WORLD_SIZE", size.to_string()));
        }
        if let Some(page) = self.page {
            variables.push(("MAINSTAY_PAGE", page.display().to_string()));
        }
        if let Some(pool) = self.checkpoint_pool {
            variables.push(("MAINSTAY_CHECKPOINT_POOL", pool.display().to_string()));
        }
        if let Some(resume) = self.resume {
            variables.push((RESUME, resume.to_owned()));
        }
        if let Some(socket) = self.rounds {
            variables.push(("MAINSTAY_ROUNDS", socket.display().to_string()));
        }
        if let Some(socket) = self.drill {
            variables.push(("MAINSTAY_DRILL", socket.display().to_string()));
        }
        if let Some(devices) = &self.devices {
            variables.push((devices::VARIABLE, devices.clone()));
        }
        self.flight_recorder(&inherited, &mut variables);
        if let Some(socket) = self.monitor {
            variables.push(("FT_RANK_MONITOR_IPC_SOCKET", socket.display().to_string()));
        }
        if let Some(file) = self.modules_file {
            variables.push(("MAINSTAY_MODULES", file.display().to_string()));
        }
        variables.extend(tunables(self.local_world_size, inherited));
        variables
    }

    /// The variables of a round, for a rank that continues in its process.
    pub fn of_the_round(&self) -> BTreeMap<String, String> {
        let variables = self.variables(|_| true).into_iter();
        let of_the_round = variables.filter(|(name, _)| OF_A_ROUND.contains(name));
        // With several hosts. Empty if ranks find the step themselves: the previous round may have had one.
        let resume = self.launcher.map(|_| (RESUME, self.resume.unwrap_or_default().to_owned()));
        of_the_round.chain(resume).map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// With these, ranks that use NCCL write their flight record when a process writes into their pipe, and go on. The pipe
    /// is next to the page, where no program copies or reads whole directories.
    fn flight_recorder(&self, inherited: impl Fn(&str) -> bool, variables: &mut Vec<(&'static str, String)>) {
        let Some(page) = self.page else { return };
        if !inherited("TORCH_NCCL_DEBUG_INFO_PIPE_FILE") {
            let stem = page.with_file_name("flight-").display().to_string();
            variables.push(("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", stem));
        }
        if !inherited("TORCH_NCCL_DEBUG_INFO_TEMP_FILE") && !inherited("TORCH_FR_DUMP_TEMP_FILE") {
            let stem = self.stacks_file.with_file_name("flight-record-").display().to_string();
            variables.push(("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", stem));
        }
    }
}

/// Variables that a user may override; the same for all ranks of a job.
pub fn tunables(local_world_size: u32, inherited: impl Fn(&str) -> bool) -> Vec<(&'static str, String)> {
    let mut variables = Vec::new();
    let mut unless_set = |name, value: &str| {
        if !inherited(name) {
            variables.push((name, value.to_owned()));
        }
    };
    unless_set("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
    // Records what each collective is and whether it is complete. By default torch does so for NCCL only.
    unless_set("TORCH_FR_BUFFER_SIZE", "2000");
    // Output goes to files, for which Python buffers blocks: a killed rank's last lines would be lost.
    unless_set("PYTHONUNBUFFERED", "1");
    if local_world_size > 1 {
        unless_set("OMP_NUM_THREADS", "1");
    }
    variables
}

/// Replaces torchrun's argument macro `${local_rank}`.
pub fn expand(argument: &str, local_rank: u32) -> String {
    argument.replace("${local_rank}", &local_rank.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment<'a>(local_world_size: u32) -> RankEnvironment<'a> {
        RankEnvironment {
            job: "j",
            run_id: "r",
            launch: "r@1",
            launcher: None,
            rank: 1,
            local_rank: 1,
            world_size: 2,
            local_world_size,
            group_rank: 0,
            group_world_size: 1,
            previous_size: None,
            role: "default",
            master_addr: "127.0.0.1",
            master_port: 1234,
            attempt: 2,
            max_restarts: 3,
            error_file: Path::new("/e"),
            stacks_file: Path::new("/s"),
            page: None,
            monitor: None,
            checkpoint_dir: Path::new("/c"),
            checkpoint_pool: None,
            resume: None,
            modules_file: None,
            rounds: None,
            drill: None,
            devices: None,
            virtual_local_rank: false,
        }
    }

    fn value(environment: RankEnvironment<'_>, set: &[&str], name: &str) -> Option<String> {
        let variables = environment.variables(|name| set.contains(&name));
        variables.into_iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    #[test]
    fn what_the_user_has_set_of_the_tunables_stays() {
        assert_eq!(value(environment(2), &[], "OMP_NUM_THREADS").as_deref(), Some("1"));
        assert_eq!(value(environment(2), &["OMP_NUM_THREADS"], "OMP_NUM_THREADS"), None);
        assert_eq!(value(environment(1), &[], "OMP_NUM_THREADS"), None);
        assert_eq!(value(environment(2), &["RANK"], "RANK").as_deref(), Some("1"));
    }

    #[test]
    fn a_rank_that_goes_on_gets_all_variables_that_a_round_changes() {
        let reported = RankEnvironment { previous_size: Some(4), ..environment(2) }.of_the_round();
        assert_eq!(reported.len(), OF_A_ROUND.len(), "{reported:?}");
        assert_eq!(reported["TORCHELASTIC_RESTART_COUNT"], "2");
        assert!(!reported.contains_key("TORCHELASTIC_ERROR_FILE"));
    }

    #[test]
    fn a_rank_that_sees_only_its_own_gpu_has_local_rank_0() {
        let own = || RankEnvironment {
            virtual_local_rank: true,
            devices: Some("GPU-7".to_owned()),
            ..environment(2)
        };
        assert_eq!(value(own(), &[], "LOCAL_RANK").as_deref(), Some("0"));
        assert_eq!(value(own(), &[], "RANK").as_deref(), Some("1"));
        assert_eq!(value(own(), &[], "CUDA_VISIBLE_DEVICES").as_deref(), Some("GPU-7"));
        assert_eq!(own().of_the_round()["LOCAL_RANK"], "0");
    }

    #[test]
    fn without_a_page_there_is_no_variable_for_one() {
        assert_eq!(value(environment(2), &[], "MAINSTAY_PAGE"), None);
    }
}
