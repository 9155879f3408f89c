//! Several hosts that run one job. One launcher leads: it runs [`Job`](crate::recovery::job::Job) over the ranks of all hosts. The
//! others report what they see and carry out commands.
//!
//! - `wire`: what launchers send each other.
//! - `sequence`: messages are numbered, acknowledged, and sent again after a reconnection; each takes effect once.
//! - `round`: who gets which ranks.
//! - `lead`: the launcher that leads, with a `link` to each follower; `recent` and `predecessor` are about the journal that it sends.
//! - `follow`: a launcher that follows it.
//! - `resize`: with how many hosts the job goes on when one is lost or comes back.
//! - `hands`: which orders a launcher carries out that come late.
//! - `merge`: the reports of all hosts become the inputs of the one job, its orders become commands for the hosts.
//! - `suspicion`: how sure it is that a host which says nothing will say nothing more.
//! - `electors`: whether the followers miss their leader.
//! - `lost`: when a host is lost, by what its leader and others see of it.
//! - `record`: what a leader keeps in the store for the next one.
//! - `succession`: what news of the leader mean for a launcher.
//! - `clock`: times of a follower on the leader's clock.
//! - `cluster_environment`: how many hosts, which is this and where they meet, by the variables of Slurm, MPI and Kubernetes.

pub mod clock;
pub mod cluster_environment;
pub mod electors;
pub mod follow;
pub mod hands;
pub mod lead;
pub mod link;
pub mod lost;
pub mod merge;
pub mod predecessor;
pub mod ready;
pub mod recent;
pub mod record;
pub mod resize;
pub mod round;
pub mod sequence;
pub mod succession;
pub mod suspicion;
pub mod wire;
