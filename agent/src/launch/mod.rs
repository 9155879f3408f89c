//! Floor 3. The shell of one job: owns the job of the core, carries out its orders.
