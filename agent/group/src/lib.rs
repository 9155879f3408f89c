//! The hosts of a job. One launcher leads: it runs [`Job`](mainstay_recovery::job::Job) over the ranks of all
//! hosts. The others report what they see and carry out commands. A job of one host is a group of one.
//!
//! - `wire`: the messages between launchers.
//! - `sequence`: messages are numbered, acknowledged, and sent again after a reconnection; each takes effect once.
//! - `round`: which host gets which ranks.
//! - `lead`: the launcher that leads, with a `link` to each follower; `recent` and `predecessor` concern the journal
//!   that it sends.
//! - `follow`: a launcher that follows the leader.
//! - `resize`: how many hosts the job continues with when one is lost or returns.
//! - `hands`: which late orders a launcher carries out.
//! - `merge`: combines the events of all hosts for the one job, and has its commands carried out on the hosts.
//! - `suspicion`: the confidence that a silent host stays silent.
//! - `electors`: whether the followers miss their leader.
//! - `preflight`: the links between the hosts before ranks start.
//! - `lost`: when a host is lost, by what its leader and others see of it.
//! - `record`: what a leader stores for the next one.
//! - `succession`: how a launcher reacts to news about the leader.
//! - `clock`: converts times between a follower's clock and the leader's.
//! - `cluster_environment`: the number of hosts, the number of this host and the endpoint, from the variables of
//!   Slurm, MPI and Kubernetes.
#![forbid(unsafe_code)]

pub mod clock;
pub mod cluster_environment;
pub mod electors;
pub mod follow;
pub mod late_orders;
pub mod lead;
pub mod link;
pub mod lost;
pub mod merge;
pub mod predecessor;
pub mod preflight;
pub mod recent;
pub mod record;
pub mod resize;
pub mod round;
pub mod sequence;
pub mod spare_ready;
pub mod succession;
pub mod suspicion;
pub mod wire;
