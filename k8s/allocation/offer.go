package allocation

// MostStrength is the largest R: a log has at most so many hosts, and R is no more than there are controllers.
const MostStrength = 127

// Offer is what an application may still place, and where the rest of its quota is (S2). Free = Offered * R, and what is left
// over by rounding.
type Offer struct {
	Quota Resources `json:"quota"`
	// Used is what its tasks have, with all their copies, those included that wait for a new place, and those that the cluster places by itself.
	Used Resources `json:"used"`
	// Free is the quota without what is used.
	Free Resources `json:"free"`
	// Offered is what one more task's copy may need.
	Offered Resources `json:"offered"`
	// Reserved is what is kept so that all that is offered can have its copies.
	Reserved Resources `json:"reserved"`
	// GivenBack is what was reserved for tasks that turned out to need fewer copies, over all time.
	GivenBack Resources `json:"givenBack"`
}

// Offer divides the free part of an application's quota by the largest R of its tasks.
func (state *State) Offer(name string) Offer {
	application := state.Applications[name]
	if application == nil {
		return Offer{}
	}
	offer := Offer{Quota: application.Quota, Used: state.used[name].Plus(application.Beside), GivenBack: application.GivenBack}
	offer.Free = offer.Quota.Minus(offer.Used)
	offer.Offered = offer.Free.DividedBy(application.MostStrength)
	offer.Reserved = offer.Offered.Times(application.MostStrength - 1)
	return offer
}

// Room is what an application may still have of its quota.
type Room struct {
	// Left is the quota without what is agreed and without what an entry under way asks for; what the cluster places by itself is not in it.
	Left Resources
	// MostStrength is what it is divided by.
	MostStrength int
}

// Offers is what one more task's copy may need, where the cluster's own tasks have so much beside.
func (room Room) Offers(beside Resources) Resources {
	return room.Left.Minus(beside).DividedBy(room.MostStrength)
}

// Whole is what all nodes together have, and Placed what copies on them have of it.
func (state *State) Whole() (whole, placed Resources) {
	for name, node := range state.Nodes {
		whole, placed = whole.Plus(node.Capacity), placed.Plus(state.onNode[name])
	}
	return whole, placed
}
