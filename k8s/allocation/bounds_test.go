package allocation

import "testing"

// Whatever somebody says that the cluster has placed by itself, or may have, it is agreed on once, and keeps nobody else's task from its places.
func TestAnAmountBeyondAllBoundsKeepsNobodyWaiting(t *testing.T) {
	cluster := Cluster{
		Nodes: []Node{{"node-0", "", one(10)}, {"node-1", "", one(10)}, {"node-2", "", one(10)}},
		Applications: []Application{
			{Name: "absurd", Quota: one(20), MostStrength: 2}, {Name: "large", Quota: one(2 * Most), MostStrength: 2}, {Name: "shop", Quota: one(20), MostStrength: 2},
		},
	}
	controller := leading(cluster)
	proposed(t, controller, 1, cluster)
	cluster.Applications[0].Beside = Resources{0, Most + 1, -1}
	proposed(t, controller, 2, cluster)
	if beside := controller.State().Applications["absurd"].Beside; beside != (Resources{0, Most, 0}) {
		t.Errorf("it has %v", beside)
	}
	// Also where something else has changed, and where the application is new.
	cluster.Nodes = cluster.Nodes[:2]
	cluster.Applications = append(cluster.Applications, Application{Name: "new", Quota: one(20), MostStrength: 2, Beside: one(1 << 50)})
	cluster.Tasks = []Task{task("critical", "shop", 2, one(2))}
	proposed(t, controller, 3, cluster)
	if controller.State().Tasks["critical"] == nil {
		t.Errorf("it waits: %+v", controller.Waits())
	}
	if changes := proposed(t, controller, 4, cluster); len(changes) > 0 {
		t.Errorf("agreed again is %+v", changes)
	}
}
