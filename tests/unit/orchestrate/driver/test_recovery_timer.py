from raymega.orchestrate.driver.recovery_timer import PHASES, RecoveryTimer


def test_phases_add_up_to_the_recovery():
    outage = RecoveryTimer(rank=3, step=7, seen_s=10.0, detection_s=0.5)
    for seconds, phase in enumerate(PHASES[:-1], start=11):
        outage.passed(phase, float(seconds))
    outage.passed("abort", 11.5)
    event = outage.recovered(step=7, restored_step=6, source="memory", now_s=20.0)
    assert event.recovery_s == sum(event.phases.values()) == 10.0
    assert list(event.phases) == list(PHASES) and event.lost_steps == 1


def test_phase_of_a_failed_try_counts_to_the_one_that_was_not_reached():
    outage = RecoveryTimer(rank=3, step=7, seen_s=10.0, detection_s=0.5)
    outage.passed("rendezvous", 12.0)
    outage.passed("abort", 13.0)
    event = outage.recovered(step=8, restored_step=6, source="store", now_s=14.0)
    assert event.phases["abort"] == 3.0 and event.phases["rendezvous"] == 0.0
