//! The agent's image under podman, with the volumes, users and rights that `deploy/examples` gives to its containers.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use mainstay_tests::{is_root, mainstay, processes, skipped};

const SIDECAR: &str = include_str!("../../../deploy/examples/sidecar.yaml");
const DAEMONSET: &str = include_str!("../../../deploy/examples/daemonset.yaml");

/// The variable that names the image, an archive that `cargo xtask test` builds.
const IMAGE: &str = "MAINSTAY_TEST_IMAGE";

/// The user of the agent, and the group of the pod's volumes (`fsGroup`).
const AGENT: u32 = 65_532;

/// The user of the training.
const TRAINING: u32 = 1000;

/// What both manifests say of the agent's container; `RUN` has the same as options of podman.
const OF_THE_AGENT: [&str; 11] = [
    "args: [agent]",
    "- {name: MAINSTAY_AGENT_HTTP, value: \"0.0.0.0:7131\"}",
    "- {name: MAINSTAY_AGENT_PLAIN_TCP, value: \"true\"}",
    "runAsUser: 65532",
    "runAsGroup: 65532",
    "fsGroup: 65532",
    "allowPrivilegeEscalation: false",
    "readOnlyRootFilesystem: true",
    "capabilities: {drop: [ALL]}",
    "- {name: socket, mountPath: /run/mainstay}",
    "- {name: state, mountPath: /var/lib/mainstay}",
];

/// crun needs control groups of one version, and this process may be without the right to raise limits.
const PODMAN: &str = r#"
if ! [ -e /sys/fs/cgroup/cgroup.controllers ]; then mount -t cgroup2 none /sys/fs/cgroup; fi
podman() {
    command podman --root "$STORAGE" --runroot "$STORAGE.run" --tmpdir "$STORAGE.tmp" --storage-driver vfs \
        --cgroup-manager cgroupfs --events-backend none "$@"
}
run() {
    podman run --rm --cgroups disabled --network none --ulimit nofile=1024:1024 --ulimit nproc=1024:1024 "$@"
}
"#;

const RUN: &str = r#"
run --pidfile "$PID_FILE" --user 65532:65532 --group-add 65532 --security-opt no-new-privileges \
    --read-only --read-only-tmpfs=false --cap-drop all --env NODE_NAME=node-7 --env MAINSTAY_AGENT_HTTP=0.0.0.0:7131 --env MAINSTAY_AGENT_PLAIN_TCP=true \
    --volume "$SOCKET:/run/mainstay" --volume "$STATE:/var/lib/mainstay" "$NAME" agent
"#;

/// The second container of the sidecar's pod: another root, here this machine's, in the pod's network and with its own
/// processes and memory. Of the agent's files it has the socket's volume, and can only read it.
const TRAIN: &str = r#"
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/socket /mnt/logs
touch /mnt/mainstay
mount --bind "$SOCKET" /mnt/socket
mount -o remount,bind,ro /mnt/socket
mount --bind "$LOGS" /mnt/logs
mount --bind "$PROGRAM" /mnt/mainstay
cd /
exec setpriv --reuid 1000 --regid 1000 --groups 65532 --no-new-privs --bounding-set -all --inh-caps -all \
    env HOME=/mnt/logs MAINSTAY_SOCKET=/mnt/socket/agent.sock "$@"
"#;

/// A rank that is killed once.
const RANK: &str = "if [ $RANK = 1 ] && mkdir /mnt/logs/once 2> /dev/null; then kill -KILL $$; fi";

/// The agent's container.
struct Pod {
    podman: Child,
    /// The first process of the container, seen from here.
    agent: String,
    directory: testing::TempDir,
}

impl Pod {
    /// Starts it, or says why this machine cannot.
    fn start() -> Result<Pod, String> {
        let image = std::env::var_os(IMAGE)
            .ok_or("MAINSTAY_TEST_IMAGE names no image: cargo xtask test builds one where buildah is")?;
        if !is_root() {
            return Err("containers with users of their own need root".to_owned());
        }
        if !Command::new("podman").arg("--version").output().is_ok_and(|output| output.status.success()) {
            return Err("podman and crun are needed".to_owned());
        }
        let directory = testing::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        for (name, user) in [("socket", 0), ("state", 0), ("logs", TRAINING)] {
            fs::create_dir(at(name)).expect("a directory");
            chown(at(name), Some(user), Some(AGENT)).expect("its owner");
            // As Kubernetes makes an emptyDir of a pod with fsGroup.
            fs::set_permissions(at(name), fs::Permissions::from_mode(0o2777)).expect("its mode");
        }
        let loaded =
            Self::podman(directory.path(), "podman load --quiet --input \"$IMAGE\"", &image).output();
        let loaded = loaded.expect("unshare");
        assert!(loaded.status.success(), "{loaded:?}");
        let name = String::from_utf8_lossy(&loaded.stdout);
        let name = OsString::from(name.trim().rsplit(' ').next().expect("its name"));
        let tried =
            Self::podman(directory.path(), "run \"$IMAGE\" --version", &name).output().expect("unshare");
        let printed = String::from_utf8_lossy(&tried.stderr);
        if !tried.status.success() && printed.contains("OCI") {
            return Err(format!("podman can run no container here: {}", printed.trim()));
        }
        assert!(tried.status.success(), "{tried:?}");
        let log = fs::File::create(at("log")).expect("a file");
        let mut run = Self::podman(directory.path(), RUN, &name);
        let podman = run.stdout(log.try_clone().expect("a file")).stderr(log).spawn().expect("unshare");
        let mut pod = Pod { podman, agent: String::new(), directory };
        let has_ended = |podman: &Child| {
            processes::state(i32::try_from(podman.id()).expect("a pid")).is_none_or(|state| state == 'Z')
        };
        let agent = || fs::read_to_string(pod.at("pid")).unwrap_or_default().trim().to_owned();
        processes::wait_until("the container has started", || !agent().is_empty() || has_ended(&pod.podman));
        pod.agent = agent();
        processes::wait_until("the agent is ready", || {
            assert!(!has_ended(&pod.podman), "{}", pod.log());
            pod.asked("/readyz").starts_with("HTTP/1.0 200 ")
        });
        Ok(pod)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.at("log")).unwrap_or_default()
    }

    /// A script with podman, whose images, mounts and state are the test's.
    fn podman(directory: &Path, script: &str, image: &OsString) -> Command {
        let mut unshare = Command::new("unshare");
        unshare
            .args(["--mount", "--propagation", "private", "sh", "-ec", &format!("{PODMAN}{script}")])
            .env("STORAGE", directory.join("images"))
            .env("PID_FILE", directory.join("pid"))
            .env("SOCKET", directory.join("socket"))
            .env("STATE", directory.join("state"))
            .env("IMAGE", image)
            .env("NAME", image)
            .stdin(Stdio::null());
        unshare
    }

    /// What a probe gets in the pod's network.
    fn asked(&self, path: &str) -> String {
        let ask = format!(
            "exec 3<> /dev/tcp/127.0.0.1/7131; printf 'GET {path} HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
        );
        let output =
            Command::new("nsenter").args(["--target", &self.agent, "--net", "bash", "-c", &ask]).output();
        String::from_utf8_lossy(&output.expect("nsenter").stdout).into_owned()
    }

    /// Runs a job in the pod's second container.
    fn train(&self, variables: &[&str]) -> Output {
        let mut train = Command::new("nsenter");
        train
            .args(["--target", &self.agent, "--net", "--ipc", "unshare", "--mount", "--pid", "--fork"])
            .args(["sh", "-ec", TRAIN, "sh"])
            .args(variables)
            .args(["/mnt/mainstay", "run", "--nproc-per-node", "2", "--log-dir", "/mnt/logs", "--no-python"])
            .args(["sh", "-c", RANK])
            .env("SOCKET", self.at("socket"))
            .env("LOGS", self.at("logs"))
            .env("PROGRAM", mainstay());
        train.output().expect("nsenter")
    }

    /// What the agent shows.
    fn status(&self) -> serde_json::Value {
        let mut status = Command::new(mainstay());
        status.args(["status", "--json", "--socket"]).arg(self.at("socket/agent.sock"));
        serde_json::from_slice(&status.output().expect("mainstay").stdout).expect("JSON")
    }

    /// What `mainstay doctor` finds in the agent's container.
    fn doctor(&self) -> serde_json::Value {
        let mut doctor = Command::new("nsenter");
        doctor.args(["--target", &self.agent, "--mount", "--net", "--ipc", "--pid", "--root"]);
        doctor.args(["--setgid", "65532", "--setuid", "65532", "/usr/bin/mainstay", "doctor", "--json"]);
        let output = doctor.env_clear().output().expect("nsenter");
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
    }

    /// SIGTERM, as Kubernetes ends a pod; the exit status of the container.
    fn stop(mut self) -> Option<i32> {
        let killed = Command::new("kill").args(["-TERM", &self.agent]).status().expect("kill");
        assert!(killed.success());
        self.podman.wait().expect("its end").code()
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.log());
        }
        if self.podman.try_wait().is_ok_and(|ended| ended.is_none()) {
            drop(Command::new("kill").args(["-KILL", &self.agent]).status());
            drop(self.podman.wait());
        }
    }
}

/// The lines of a manifest that give a container something of another container or of the node.
fn shares(manifest: &str) -> BTreeSet<&str> {
    let words = [
        "mountPath:",
        "hostPath",
        "hostPID",
        "hostNetwork",
        "hostIPC",
        "shareProcessNamespace",
        "privileged",
    ];
    manifest.lines().map(str::trim).filter(|line| words.iter().any(|word| line.contains(word))).collect()
}

#[test]
fn the_sidecar_serves_the_training_of_its_pod_over_the_volume_of_the_socket_alone() {
    for line in OF_THE_AGENT {
        assert!(SIDECAR.lines().any(|of| of.trim() == line), "the test plays {line}");
    }
    let trust = "- {name: MAINSTAY_AGENT_UID, value: \"65532\"}";
    assert!(SIDECAR.contains(trust) && SIDECAR.contains("runAsUser: 1000"));
    let of_training = [
        "- {name: socket, mountPath: /run/mainstay, readOnly: true}",
        "- {name: memory, mountPath: /dev/shm}",
        "- {name: checkpoints, mountPath: /checkpoints}",
    ];
    let of_agent = OF_THE_AGENT.iter().copied().filter(|line| line.contains("mountPath"));
    assert_eq!(shares(SIDECAR), of_agent.chain(of_training).collect());

    let pod = match Pod::start() {
        Ok(pod) => pod,
        Err(reason) => return skipped(&reason),
    };
    assert!(pod.asked("/healthz").starts_with("HTTP/1.0 200 "));
    let status = pod.status();
    assert!(status.to_string().contains("\"node-7\""), "{status}");

    // An agent of another user is not trusted unless the pod says so: the job runs without it.
    let has_job = || pod.status().to_string().contains("/mnt/logs/");
    let alone = pod.train(&[]);
    assert!(alone.status.success() && !has_job(), "{alone:?}");
    fs::remove_dir(pod.at("logs/once")).expect("one rank was killed");
    let trained = pod.train(&["MAINSTAY_AGENT_UID=65532"]);
    assert!(trained.status.success() && has_job(), "{trained:?}\n{}", pod.status());
    assert_eq!(pod.stop(), Some(0));
}

#[test]
fn the_daemon_set_shows_its_node_without_any_right() {
    for line in OF_THE_AGENT {
        assert!(DAEMONSET.lines().any(|of| of.trim() == line), "the test plays {line}");
    }
    let of_agent = OF_THE_AGENT.iter().copied().filter(|line| line.contains("mountPath"));
    assert_eq!(shares(DAEMONSET), of_agent.collect());

    let pod = match Pod::start() {
        Ok(pod) => pod,
        Err(reason) => return skipped(&reason),
    };
    let doctor = pod.doctor();
    let findings = doctor["findings"].as_array().expect("a list");
    let found = |what: &str| {
        findings.iter().find(|finding| finding["what"] == what).map(|finding| finding["found"].as_str())
    };
    // It is a container, in which no kernel log and no etcd are.
    assert_eq!(found("container"), Some(Some("ok")), "{doctor}");
    assert_eq!([found("kernel log"), found("etcd")], [Some(Some("absent")); 2], "{doctor}");
    let metrics = pod.asked("/metrics");
    assert!(metrics.contains("mainstay_node_state{state=\"HEALTHY\"}"), "{metrics}");
    let rights = fs::read_to_string(format!("/proc/{}/status", pod.agent)).expect("its status");
    for line in
        ["CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Uid:\t65532\t65532"]
    {
        assert!(rights.lines().any(|of| of.starts_with(line)), "{line}: {rights}");
    }
    assert_eq!(pod.stop(), Some(0));
}
