//! Hosts that have nothing in common but a directory, as the tasks of a Slurm array, agree there on where they meet.
//!
//! The directory has files `GENERATION.SLOT`, each with the endpoint of one host. A host takes a slot by a hard link, which
//! only one host can create, and shows that it is alive by the time of its file. The hosts with the slots of the newest
//! generation run the store of the job: one host with the built-in store, or three with etcd. If most of them are gone, no
//! launcher can lead the job by that store, and the next host starts another generation. `GENERATION.ended` has the status
//! with which the job ended. `token` has a random secret, which only the user can read. Hosts of a Slurm step that share a
//! directory have such a secret there, too.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use anyhow::{Context, bail};
use mainstay_coord::Endpoint;
use nix::fcntl::{AT_FDCWD, OFlag};
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;
use tokio::time::Instant;

use crate::group::plan::{HostsPlan, StoreKind};
use crate::log_mirror::silenceable_mount;

/// A longer secret is cut.
const MOST_TOKEN_BYTES: u64 = 4096;

/// How often the host of a slot shows that it is alive.
const TOUCH_INTERVAL: Duration = Duration::from_secs(5);

/// A host that has not shown that for so long, and does not answer at its endpoint either, is gone. Longer than the lease of
/// a leader.
const GONE_TIMEOUT: Duration = Duration::from_secs(30);

/// The pause between two looks at the directory.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// How long the directory's file system may take.
const FILE_SYSTEM_TIMEOUT: Duration = Duration::from_secs(30);

const ENDED: &str = "ended";

/// The secret of the job.
const TOKEN: &str = "token";

/// Below a directory that hosts share: what they agree on there.
pub const DIRECTORY: &str = ".mainstay-hosts";

/// A directory in which hosts agree on where they meet.
#[derive(Clone, Debug)]
pub struct Meeting {
    /// The directory; it is created.
    pub directory: PathBuf,
    /// The endpoint of this host.
    pub me: Endpoint,
    /// Whether this host has the program `etcd`.
    pub has_etcd: bool,
    /// The number of slots if this host takes the first: one, or three for etcd.
    pub slots: usize,
}

/// The result of [`find`].
#[derive(Debug)]
pub enum MeetingResult {
    /// The hosts meet here.
    At(Box<HostsPlan>, Option<Attendance>),
    /// The job has ended with this status.
    Ended(i32),
}

/// Waits until the hosts have agreed on where they meet, if the plan leaves that to them.
///
/// # Errors
/// The directory cannot be used, or too few hosts have come in time.
pub async fn find(plan: HostsPlan, print: &impl Fn(String)) -> anyhow::Result<MeetingResult> {
    let Some(meeting) = plan.meeting.clone() else {
        let token = match (&plan.token, &plan.token_file) {
            (None, Some(file)) => token_of_hosts(file, print).await,
            (given, _) => given.clone(),
        };
        return Ok(MeetingResult::At(Box::new(HostsPlan { token, ..plan }), None));
    };
    let directory = meeting.directory.display().to_string();
    let until = Instant::now() + Duration::from_nanos(plan.waits().0);
    let mut reported = String::new();
    loop {
        let (look, returns) = (meeting.clone(), plan.returning);
        let look = tokio::task::spawn_blocking(move || look.look(returns));
        let Ok(look) = tokio::time::timeout(FILE_SYSTEM_TIMEOUT, look).await else {
            bail!("{directory}: its file system has not answered within {FILE_SYSTEM_TIMEOUT:?}");
        };
        let look = look.context("looking where the hosts meet")?;
        match look.with_context(|| format!("{directory}, where the hosts agree on where they meet"))? {
            Look::Again => continue,
            Look::Ended(exit) => return Ok(MeetingResult::Ended(exit)),
            Look::Meet { generation, endpoints, slot } => {
                let (endpoints, store) = match Endpoint::parse_list(&endpoints.join(","), meeting.me.port) {
                    Ok(one) if one.len() == 1 => (one, StoreKind::Builtin),
                    Ok(more) => (more, StoreKind::Managed),
                    Err(error) => bail!("{directory}: {error}"),
                };
                let place = Attendance::keep(&meeting, generation, slot)
                    .with_context(|| format!("keeping this host's place in {directory}"))?;
                let is_host = matches!(store, StoreKind::Builtin).then_some(place.has_slot).or(plan.is_host);
                let token = match plan.token {
                    Some(token) => token,
                    None => shared_token(&meeting.directory.join(TOKEN))
                        .with_context(|| format!("the secret of the job in {directory}"))?,
                };
                let plan = HostsPlan { endpoints, store, is_host, token: Some(token), ..plan };
                print(format!("the hosts meet at {} ({directory})", plan.endpoint()));
                return Ok(MeetingResult::At(Box::new(plan), Some(place)));
            }
            Look::Wait(why) => {
                if Instant::now() >= until {
                    bail!("{directory}: {why}, after {}", plan.waits());
                }
                if why != reported {
                    print(format!("{why} ({directory})"));
                    reported = why;
                }
            }
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// What a look into the directory shows.
#[derive(Debug, PartialEq)]
enum Look {
    /// The directory has just changed.
    Again,
    Wait(String),
    Meet {
        generation: u64,
        endpoints: Vec<String>,
        slot: Option<PathBuf>,
    },
    Ended(i32),
}

/// Hosts that agreed on each other.
#[derive(Debug, Default)]
struct Generation {
    number: u64,
    /// The endpoint of each slot that is taken.
    slots: BTreeMap<usize, String>,
    /// How many slots there are, by the host that took the first.
    slot_count: usize,
    /// The status with which the job ended.
    ended: Option<i32>,
}

impl Meeting {
    fn look(&self, returns: bool) -> io::Result<Look> {
        fs::create_dir_all(&self.directory)?;
        let Generation { number, slots, slot_count, ended } = self.newest()?;
        match ended {
            Some(exit) if exit == 0 || returns => return Ok(Look::Ended(exit)),
            Some(_) => return self.take(number + 1, 1, self.slots),
            None if slots.is_empty() => return self.take(number.max(1), 1, self.slots),
            None => {}
        }
        let mine = slots.iter().find(|(_, endpoint)| **endpoint == self.me.authority());
        let slot = mine.map(|(slot, _)| self.file(number, *slot));
        if let Some(slot) = &slot {
            touch(slot)?;
        }
        if slots.len() < slot_count {
            if slot.is_none() && self.has_etcd {
                return self.take(number, slots.len() + 1, slot_count);
            }
            let missing = slot_count - slots.len();
            return Ok(Look::Wait(format!(
                "waiting for {missing} more host(s) that can run etcd for the job"
            )));
        }
        if !self.are_most_alive(number, &slots, slot_count)? {
            return self.take(number + 1, 1, self.slots);
        }
        Ok(Look::Meet { generation: number, endpoints: slots.into_values().collect(), slot })
    }

    fn are_most_alive(&self, number: u64, slots: &BTreeMap<usize, String>, of: usize) -> io::Result<bool> {
        let now = self.now_there()?;
        let is_alive = |(slot, endpoint): &(&usize, &String)| {
            **endpoint == self.me.authority()
                || is_fresh(&self.file(number, **slot), now)
                || answers(endpoint)
        };
        Ok(slots.iter().filter(is_alive).count() > of / 2)
    }

    /// Whether the hosts still meet as this generation has it.
    fn is_current(&self, generation: u64) -> io::Result<bool> {
        let Generation { number, slots, slot_count, ended } = self.newest()?;
        Ok(number == generation && ended.is_none() && self.are_most_alive(number, &slots, slot_count)?)
    }

    /// The newest generation; an empty one if there is none.
    fn newest(&self) -> io::Result<Generation> {
        let mut newest = Generation::default();
        for entry in fs::read_dir(&self.directory)? {
            let name = entry?.file_name();
            let parts = name.to_str().and_then(|name| name.split_once('.'));
            let Some((Ok(number), part)) = parts.map(|(number, part)| (number.parse(), part)) else {
                continue;
            };
            if number > newest.number {
                newest = Generation { number, ..Generation::default() };
            }
            if number < newest.number {
                continue;
            }
            let text = fs::read_to_string(self.directory.join(&name))?;
            if part == ENDED {
                newest.ended = Some(text.trim().parse().unwrap_or(1));
            } else if let (Ok(slot), Some((endpoint, slot_count))) =
                (part.parse(), text.trim().split_once(' '))
            {
                newest.slots.insert(slot, endpoint.to_owned());
                newest.slot_count = slot_count.parse().unwrap_or(1);
            }
        }
        Ok(newest)
    }

    /// Takes a slot, or finds that another host was faster.
    fn take(&self, generation: u64, slot: usize, of: usize) -> io::Result<Look> {
        let text = format!("{} {of}", self.me.authority());
        create(&self.directory, &self.file(generation, slot), &text)?;
        Ok(Look::Again)
    }

    fn file(&self, generation: u64, slot: usize) -> PathBuf {
        self.directory.join(format!("{generation}.{slot}"))
    }

    /// The time of the file server, which gives files their times.
    fn now_there(&self) -> io::Result<std::time::SystemTime> {
        let file = self.directory.join(temporary());
        fs::write(&file, "")?;
        let now = fs::metadata(&file).and_then(|of| of.modified());
        fs::remove_file(&file)?;
        now
    }
}

/// Where the hosts of a job that share this directory keep a secret; none if it is on a disk of this host. Looks only at the
/// table of mounts.
pub fn token_file(directory: &Path) -> Option<PathBuf> {
    // The root of a virtual machine, or of a host without disks, may be another one on each host.
    let mount = silenceable_mount(directory).filter(|mount| mount.point != Path::new("/"));
    mount.map(|_| directory.join(DIRECTORY).join(TOKEN))
}

/// The secret in this file, which the first host makes. Without one the job runs, too, and the host with the store reports
/// who can read it.
async fn token_of_hosts(file: &Path, print: &impl Fn(String)) -> Option<String> {
    let own = file.to_owned();
    let reading = tokio::task::spawn_blocking(move || {
        own.parent().map_or(Ok(()), fs::create_dir_all)?;
        shared_token(&own)
    });
    let read = match tokio::time::timeout(FILE_SYSTEM_TIMEOUT, reading).await {
        Ok(read) => {
            read.map_err(|error| error.to_string()).and_then(|read| read.map_err(|error| error.to_string()))
        }
        Err(_) => Err(format!("its file system has not answered within {FILE_SYSTEM_TIMEOUT:?}")),
    };
    match &read {
        Ok(_) => print(format!("the secret of the job is in {}", file.display())),
        Err(why) => print(format!("no secret of the job in {}: {why}", file.display())),
    }
    read.ok()
}

/// The secret in a file that all hosts of a job can read. The first of them that finds none makes one.
///
/// # Errors
/// The file cannot be read or made, or other users can read it.
pub fn shared_token(file: &Path) -> io::Result<String> {
    let directory = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !file.try_exists()? {
        let mut bytes = [0; 32];
        fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        create_with(directory, file, blake3::Hash::from_bytes(bytes).to_hex().as_str(), 0o600)?;
    }
    let mut text = String::new();
    let opened = fs::OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
        .open(file)?;
    let found = opened.metadata()?;
    let mode = found.mode() & 0o777;
    if !found.is_file() || mode & 0o077 != 0 {
        let why =
            format!("{}: others may read it (mode {mode:o}): make it a file of mode 0600", file.display());
        return Err(io::Error::new(ErrorKind::InvalidData, why));
    }
    opened.take(MOST_TOKEN_BYTES).read_to_string(&mut text)?;
    match text.trim() {
        "" => Err(io::Error::new(ErrorKind::InvalidData, format!("{}: it is empty", file.display()))),
        token => Ok(token.to_owned()),
    }
}

/// Creates a file that has its whole content from the first moment, unless it is there.
fn create(directory: &Path, file: &Path, text: &str) -> io::Result<()> {
    create_with(directory, file, text, 0o666)
}

/// The same with this mode, as far as the umask allows it.
fn create_with(directory: &Path, file: &Path, text: &str, mode: u32) -> io::Result<()> {
    let whole = directory.join(temporary());
    let mut written = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&whole)?;
    written.write_all(text.as_bytes())?;
    drop(written);
    let linked = fs::hard_link(&whole, file);
    fs::remove_file(&whole)?;
    match linked {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// A unique name. The process id alone may be the same in another container.
fn temporary() -> String {
    format!(".{}-{:x}", std::process::id(), mainstay_sys::clock::now().wall.0)
}

fn touch(file: &Path) -> io::Result<()> {
    let now = TimeSpec::UTIME_NOW;
    Ok(utimensat(AT_FDCWD, file, &now, &now, UtimensatFlags::FollowSymlink)?)
}

fn is_fresh(file: &Path, now: std::time::SystemTime) -> bool {
    let shown = fs::metadata(file).and_then(|of| of.modified());
    // One from the future is fresh.
    shown.is_ok_and(|shown| now.duration_since(shown).is_ok_and(|age| age < GONE_TIMEOUT) || shown > now)
}

fn answers(endpoint: &str) -> bool {
    let Ok(found) = Endpoint::parse_list(endpoint, 0) else { return false };
    let addresses =
        found.iter().flat_map(|of| of.addresses().into_iter().map(|ip| SocketAddr::new(ip, of.port)));
    addresses.into_iter().any(|address| TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_ok())
}

/// This host's place in a meeting. While it is kept, a slot of this host shows that it is alive.
#[derive(Debug)]
pub struct Attendance {
    meeting: Meeting,
    generation: u64,
    has_slot: bool,
    _stop: Sender<()>,
}

impl Attendance {
    fn keep(meeting: &Meeting, generation: u64, slot: Option<PathBuf>) -> io::Result<Attendance> {
        let (stop, stopped) = channel::<()>();
        let has_slot = slot.is_some();
        if let Some(slot) = slot {
            let keep = move || {
                while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(TOUCH_INTERVAL) {
                    // A file system that does not answer now may do so later; until then, others ask at the endpoint.
                    let _ = touch(&slot);
                }
            };
            std::thread::Builder::new().name("meeting".to_owned()).spawn(keep)?;
        }
        Ok(Attendance { meeting: meeting.clone(), generation, has_slot, _stop: stop })
    }

    /// Waits until the hosts do not meet here any more: most of those that keep the store are gone, or the job has ended.
    pub async fn is_given_up(&self) {
        loop {
            tokio::time::sleep(TOUCH_INTERVAL).await;
            let (meeting, generation) = (self.meeting.clone(), self.generation);
            let look = tokio::task::spawn_blocking(move || meeting.is_current(generation));
            // A file system that does not answer says nothing about the hosts.
            if let Ok(Ok(Ok(false))) = tokio::time::timeout(FILE_SYSTEM_TIMEOUT, look).await {
                return;
            }
        }
    }

    /// Notes that the job has ended, for hosts that come later.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn ended(&self, exit: i32) -> io::Result<()> {
        let directory = &self.meeting.directory;
        let file = directory.join(format!("{}.{ENDED}", self.generation));
        create(directory, &file, &exit.to_string())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn host(directory: &Path, name: &str, slots: usize) -> Meeting {
        let me = Endpoint { tls: false, host: name.to_owned(), port: 9 };
        Meeting { directory: directory.join("meeting"), me, has_etcd: slots > 1, slots }
    }

    fn look(host: &Meeting) -> Look {
        loop {
            match host.look(false).expect("a look") {
                Look::Again => {}
                look => return look,
            }
        }
    }

    fn met(look: Look) -> (u64, Vec<String>, bool) {
        match look {
            Look::Meet { generation, endpoints, slot } => (generation, endpoints, slot.is_some()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn hosts_share_a_random_secret_that_others_cannot_read() {
        let directory = testing::tempdir().expect("a directory");
        let file = directory.path().join("token");
        let first = shared_token(&file).expect("a new secret");
        assert_eq!((first.len(), shared_token(&file).expect("the same")), (64, first.clone()));
        assert_eq!(fs::metadata(&file).expect("a file").permissions().mode() & 0o777, 0o600);
        assert_ne!(shared_token(&directory.path().join("other")).expect("another"), first);
        let refused = |file: &Path| shared_token(file).expect_err("not used").kind();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&file, &link).expect("a link");
        refused(&link);
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("our own file");
        assert_eq!(refused(&file), ErrorKind::InvalidData);
        let empty = directory.path().join("empty");
        fs::write(&empty, " \n").expect("a file");
        fs::set_permissions(&empty, fs::Permissions::from_mode(0o600)).expect("our own file");
        assert_eq!(refused(&empty), ErrorKind::InvalidData);
        refused(&directory.path().join("missing/token"));
    }

    #[tokio::test]
    async fn hosts_of_a_step_share_a_secret_and_run_without_one_where_none_can_be_made() {
        let directory = testing::tempdir().expect("a directory");
        let file = directory.path().join("checkpoints").join(DIRECTORY).join(TOKEN);
        let (first, second) = tokio::join!(token_of_hosts(&file, &|_| ()), token_of_hosts(&file, &|_| ()));
        assert!(first.as_ref().is_some_and(|token| token.len() == 64));
        assert_eq!(first, second);
        assert_eq!(token_of_hosts(&file.join("below"), &|_| ()).await, None);
        assert_eq!(token_file(directory.path()), None, "a disk of this host");
        let proc = Path::new("/proc/self/mounts");
        assert_eq!(token_file(proc), None, "{}", proc.display());
    }

    /// A host that has not shown for long that it is alive.
    fn age(directory: &Path, file: &str) {
        let long_ago = std::time::SystemTime::now() - GONE_TIMEOUT * 2;
        let file = fs::File::options().append(true).open(directory.join("meeting").join(file));
        file.and_then(|file| file.set_modified(long_ago)).expect("our own file");
    }

    #[test]
    fn the_first_host_has_the_store_and_one_that_is_gone_is_replaced_by_the_next() {
        let directory = testing::tempdir().expect("a directory");
        let at = directory.path();
        let hosts = ["127.0.0.2", "127.0.0.3", "127.0.0.4"].map(|name| host(at, name, 1));
        assert_eq!(met(look(&hosts[0])), (1, vec!["127.0.0.2:9".to_owned()], true));
        assert_eq!(met(look(&hosts[1])), (1, vec!["127.0.0.2:9".to_owned()], false));
        assert!(hosts[1].is_current(1).expect("a look"));
        age(at, "1.1");
        assert!(!hosts[1].is_current(1).expect("a look"), "no one waits for it any more");
        assert!(hosts[0].is_current(1).expect("a look"), "this host itself");
        assert_eq!(met(look(&hosts[1])), (2, vec!["127.0.0.3:9".to_owned()], true));
        assert!(!hosts[0].is_current(1).expect("a look"), "others have agreed on another host");
        assert_eq!(met(look(&hosts[2])), (2, vec!["127.0.0.3:9".to_owned()], false));
        assert_eq!(met(look(&hosts[0])), (2, vec!["127.0.0.3:9".to_owned()], false), "it comes back later");
        // The host of the store comes back: it has its place again.
        age(at, "2.1");
        assert_eq!(met(look(&hosts[1])), (2, vec!["127.0.0.3:9".to_owned()], true));
        assert!(is_fresh(&at.join("meeting/2.1"), std::time::SystemTime::now()));
    }

    #[test]
    fn three_hosts_with_etcd_have_the_store_until_most_of_them_are_gone() {
        let directory = testing::tempdir().expect("a directory");
        let at = directory.path();
        let hosts = ["127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"].map(|name| host(at, name, 3));
        let without = Meeting { has_etcd: false, ..host(at, "127.0.0.6", 1) };
        assert!(matches!(look(&hosts[0]), Look::Wait(_)));
        assert!(matches!(look(&without), Look::Wait(_)), "it waits for those that have etcd");
        assert!(matches!(look(&hosts[1]), Look::Wait(_)));
        let three: Vec<String> = ["127.0.0.2:9", "127.0.0.3:9", "127.0.0.4:9"].map(str::to_owned).to_vec();
        assert_eq!(met(look(&hosts[2])), (1, three.clone(), true));
        assert_eq!(met(look(&hosts[3])), (1, three.clone(), false));
        assert_eq!(met(look(&without)), (1, three.clone(), false));
        age(at, "1.1");
        assert_eq!(met(look(&hosts[3])), (1, three, false), "two of three keep the store");
        age(at, "1.2");
        assert!(matches!(look(&hosts[3]), Look::Wait(_)), "another three are needed");
        assert!(at.join("meeting/2.1").exists());
    }

    #[test]
    fn a_host_that_answers_is_not_gone() {
        let directory = testing::tempdir().expect("a directory");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let first = host(directory.path(), "127.0.0.1", 1);
        let first = Meeting { me: Endpoint { port, ..first.me.clone() }, ..first };
        let second = host(directory.path(), "127.0.0.3", 1);
        look(&first);
        age(directory.path(), "1.1");
        assert_eq!(met(look(&second)).1, [format!("127.0.0.1:{port}")]);
        drop(listener);
        assert_eq!(met(look(&second)).1, ["127.0.0.3:9"]);
    }

    #[test]
    fn a_host_that_comes_after_the_end_learns_it_and_a_job_that_failed_may_start_again() {
        let directory = testing::tempdir().expect("a directory");
        let [first, second] = ["127.0.0.2", "127.0.0.3"].map(|name| host(directory.path(), name, 1));
        look(&first);
        let place = |generation| Attendance::keep(&first, generation, None).expect("a place");
        place(1).ended(75).expect("a note");
        assert_eq!(second.look(true).expect("a look"), Look::Ended(75), "a launcher that comes back");
        assert_eq!(met(look(&second)), (2, vec!["127.0.0.3:9".to_owned()], true));
        place(2).ended(0).expect("a note");
        place(2).ended(1).expect("the first note counts");
        assert_eq!(look(&first), Look::Ended(0));
    }

    #[test]
    fn hosts_that_come_at_once_agree() {
        let directory = testing::tempdir().expect("a directory");
        let hosts: Vec<Meeting> =
            (2..10).map(|number| host(directory.path(), &format!("127.0.0.{number}"), 1)).collect();
        let found: Vec<_> = std::thread::scope(|scope| {
            let all: Vec<_> = hosts.iter().map(|host| scope.spawn(|| met(look(host)))).collect();
            all.into_iter().map(|one| one.join().expect("it looks")).collect()
        });
        assert_eq!(found.iter().filter(|(_, _, has_store)| *has_store).count(), 1);
        assert!(found.iter().all(|(_, endpoints, _)| endpoints == &found[0].1), "{found:?}");
    }
}
